package registry

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/transport"
)

// TestNamesInLayers: archives can write the name of a file in several ways, and some names only
// look like it. Pulling and serving must agree on them, in the layers of a containerDisk and in
// plain ones.
func TestNamesInLayers(t *testing.T) {
	content := noise(95, 64<<10)
	for name, c := range map[string]struct {
		is  string // its name in the directory of the disks
		err string
	}{
		"disk/x.img":         {is: "x.img"},
		"./disk/x.img":       {is: "x.img"},
		"/disk/x.img":        {is: "x.img"},
		"disk//x.img":        {is: "x.img"},
		"disk/./x.img":       {is: "x.img"},
		"//./disk//x.img":    {is: "x.img"},
		"disk/../x.img":      {err: "disk/../x.img"},
		"./disk/../x.img":    {err: "disk/../x.img"},
		"/disk/../x.img":     {err: "disk/../x.img"},
		"../disk/x.img":      {err: "../disk/x.img"},
		"etc/../disk/x.img":  {err: "etc/../disk/x.img"},
		"disk/../../x.img":   {err: "disk/../../x.img"},
		"disk/a/../x.img":    {err: "disk/a/../x.img"},
		"disk/..":            {err: "disk/.."},
		"Disk/x.img":         {err: "has no disk"},
		"disk./x.img":        {err: "has no disk"},
		"etc/disk/x.img":     {err: "has no disk"},
		"..disk/x.img":       {err: "has no disk"},
		"disk /x.img":        {err: "has no disk"},
		"disk/..x.img":       {is: "..x.img"},
		"disk/x..img":        {is: "x..img"},
		"disk/ x.img":        {is: " x.img"},
		"disk\\..\\x.img":    {err: "has no disk"},
		"disk/..\\..\\x.img": {is: "..\\..\\x.img"},
	} {
		plain := tarOf(t, tarFile{Name: name, Content: content})
		for how, layer := range map[string][]byte{"plain": plain, "gzip": gzipped(t, plain)} {
			t.Run(fmt.Sprintf("%q %s", name, how), func(t *testing.T) {
				s := store{}
				ref := layoutOf(t, s, s.Image(t, layer))
				dir, err := pull(t, ref, PullOptions{})
				served, name2, err2 := serveOne(t, ref)
				if c.err != "" {
					require.ErrorContains(t, err, c.err)
					emptyDir(t, dir)
					require.ErrorContains(t, err2, c.err)
					return
				}
				require.NoError(t, err)
				onlyFile(t, dir, "out.raw", content)
				require.NoError(t, err2)
				require.Equal(t, c.is, name2)
				require.True(t, bytes.Equal(content, served))

				dir = t.TempDir()
				_, _, err = newClient(t, transport.Options{}).Pull(context.Background(), ref, dir,
					PullOptions{})
				require.NoError(t, err)
				onlyFile(t, dir, filepath.Base(c.is), content)
			})
		}
	}
}

// serveOne reads the one disk of an image as serve would.
func serveOne(t *testing.T, ref transport.Reference) (content []byte, name string, err error) {
	t.Helper()
	s := newStreaming(t, newClient(t, transport.Options{}), t.TempDir(), t.TempDir())
	st, err := s.client.Stream(t.Context(), ref, s.opt)
	if err != nil {
		return nil, "", err
	}
	defer func() { require.NoError(t, st.Close()) }()
	require.Len(t, st.Disks(), 1)
	name = st.Disks()[0].Name
	img, err := st.Open(t.Context(), name, image.Options{})
	if err != nil {
		return nil, name, err
	}
	defer func() { require.NoError(t, img.Close()) }()
	return contentOf(t, img), name, nil
}
