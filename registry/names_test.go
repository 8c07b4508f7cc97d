package registry

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// TestNamesInLayers: archives can write the name of a file in several ways, and some names only
// look like it. Pulling and serving must agree on them, in the layers of a containerDisk and in
// plain ones. But what is no UTF-8 can only be pulled: records cannot keep the name.
func TestNamesInLayers(t *testing.T) {
	content := noise(95, 64<<10)
	for name, c := range map[string]struct {
		is      string // its name in the directory of the disks
		err     string
		serving string // the error of serving alone
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
		"disk/\xff.img":      {is: "\xff.img", serving: "\\xff.img\", whose name is no UTF-8"},
	} {
		plain := tarOf(t, tarFile{Name: name, Content: content})
		for how, layer := range map[string][]byte{"plain": plain, "gzip": gzipped(t, plain)} {
			t.Run(fmt.Sprintf("%q %s", name, how), func(t *testing.T) {
				ref := imageOf(t, layer)
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
				if c.serving != "" {
					require.ErrorContains(t, err2, c.serving)
				} else {
					require.NoError(t, err2)
					require.Equal(t, c.is, name2)
					require.True(t, bytes.Equal(content, served))
				}

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

// TestChooseOldDisk: a number at the end of a name may tell disks apart, or versions of one.
func TestChooseOldDisk(t *testing.T) {
	for name, c := range map[string]struct {
		disks []string
		want  string // "": an error
	}{
		"only.qcow2":   {[]string{"other.raw"}, "other.raw"},
		"disk.1.raw":   {[]string{"disk.1.qcow2", "disk.2.qcow2"}, "disk.1.qcow2"},
		"disk.1.qcow2": {[]string{"disk.1.7.qcow2", "disk.2.qcow2"}, "disk.1.7.qcow2"},
		"disk.qcow2":   {[]string{"disk.1.qcow2", "disk.2.qcow2"}, ""},
		"a.43.qcow2":   {[]string{"a.42.qcow2", "b.qcow2"}, "a.42.qcow2"},
		"c.qcow2":      {[]string{"a.qcow2", "b.qcow2"}, ""},
	} {
		o := &oldDisk{disks: c.disks}
		err := o.choose(name)
		require.Equal(t, c.want == "", err != nil, "%s: %v", name, err)
		require.True(t, err != nil || o.top == c.want, "%s: %s", name, o.top)
	}
}

// TestForeign: images of other programs are pulled and pushed where that is allowed. Otherwise, as
// where they would be served, the error says how to convert them.
func TestForeign(t *testing.T) {
	testtool.Need(t, "qemu-img")
	raw := append(noise(99, 3<<20), make([]byte, 4<<20)...)
	dir, tmp := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), raw, 0o644))
	allowed := image.Options{Foreign: true}
	for name, format := range map[string]string{"box.vhdx": "vhdx", "box.vmdk": "vmdk"} {
		qemuImg(t, dir, "convert", "-f", "raw", "-O", format, "raw", name)
		path := filepath.Join(dir, name)
		content := bytesOf(t, path)
		for title, content := range map[string][]byte{name: content,
			name + ".gz": gzipped(t, content),
			"box.tar":    packtest.Tar(t, packtest.File{Name: name, Data: content})} {
			ref := orasOf(t, title, content)
			c := newClient(t, transport.Options{})
			brings(t, c, ref, PullOptions{Image: allowed}, raw)
			var out bytes.Buffer
			_, _, err := c.Pull(t.Context(), ref, "-", PullOptions{Image: allowed, Stdout: &out})
			require.NoError(t, err, title)
			require.True(t, bytes.Equal(raw, out.Bytes()), title)
			to := t.TempDir()
			_, _, err = c.Pull(t.Context(), ref, to, PullOptions{Image: allowed})
			require.NoError(t, err, title)
			onlyFile(t, to, "box.raw", raw)
			to, err = pull(t, ref, PullOptions{})
			require.ErrorContains(t, err, "\"kubevirt-disk convert ", title)
			emptyDir(t, to)
		}
		brings(t, newClient(t, transport.Options{}), orasOf(t, name, content),
			PullOptions{Image: allowed, Original: true}, content)
		to, err := pull(t, orasOf(t, name, content[:len(content)/2]), PullOptions{Image: allowed})
		require.ErrorContains(t, err, "is a damaged")
		emptyDir(t, to)

		m := newMemory(t)
		for _, opt := range []PushOptions{{Base: BaseNone, CompressRaw: "zstd"}, {Artifact: true}} {
			opt.Image = allowed
			pushes(t, m.client(t), []string{path}, m.ref(t, "vm/a:1"), opt)
			brings(t, m.client(t), m.ref(t, "vm/a:1"), PullOptions{}, raw)
		}
		_, err = m.client(t).Push(t.Context(), []string{path}, m.ref(t, "vm/a:2"),
			PushOptions{Base: BaseNone})
		require.ErrorContains(t, err, "kubevirt-disk convert")
		emptyDir(t, tmp)
	}
	// Only the end of a fixed VHD image tells what it is.
	qemuImg(t, dir, "convert", "-f", "raw", "-O", "vpc", "-o", "subformat=fixed,force_size=on",
		"raw", "fixed.img")
	fixed := bytesOf(t, filepath.Join(dir, "fixed.img"))
	for title, content := range map[string][]byte{"fixed.vhd": fixed,
		"fixed.img.gz": gzipped(t, fixed)} {
		ref := orasOf(t, title, content)
		c := newClient(t, transport.Options{})
		brings(t, c, ref, PullOptions{Image: allowed}, raw)
		brings(t, c, ref, PullOptions{Image: allowed, Original: true}, fixed)
		to, err := pull(t, ref, PullOptions{})
		require.ErrorContains(t, err, "kubevirt-disk convert ")
		emptyDir(t, to)
	}
}

// TestInside: what an image has inside is told without fetching it, whether it is streamed or not.
func TestInside(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir := t.TempDir()
	raw := append(noise(41, 40<<20), make([]byte, 1<<20)...) // more than a layer that is read whole
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.raw"), raw, 0o644))
	qemuImg(t, dir, "create", "-f", "qcow2", "below.qcow2", "1G")
	qemuImg(t, dir, "create", "-f", "qcow2", "-b", "below.qcow2", "-F", "qcow2", "a.qcow2", "2G")
	m := newMemory(t)
	pushes(t, m.client(t), []string{filepath.Join(dir, "a.qcow2"), filepath.Join(dir, "b.raw")},
		m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})

	look := func(c *Client, ref transport.Reference) *Inside {
		t.Helper()
		return testtool.Must(c.Inside(t.Context(), ref, t.TempDir()))(t)
	}
	all := look(m.client(t), m.ref(t, "vm/a:1"))
	require.Empty(t, all.Whole)
	require.Len(t, all.Disks, 2)
	require.Equal(t, "a.qcow2", all.Disks[0].Name)
	require.Equal(t, image.FormatQcow2, all.Disks[0].Format)
	require.EqualValues(t, 2<<30, all.Disks[0].VirtualSize)
	require.Equal(t, "below.qcow2", all.Disks[0].BackingChain[0].Name)
	require.Equal(t, "b.raw", all.Disks[1].Name)
	require.EqualValues(t, len(raw), all.Disks[1].VirtualSize)

	qcow2 := bytesOf(t, filepath.Join(dir, "a.qcow2"))
	local := newClient(t, transport.Options{})
	for _, c := range []struct {
		title   string
		content []byte
		name    string
		format  image.Format
		size    int64 // of the disk; 0: only known when it is fetched
	}{
		{"a.qcow2.gz", gzipped(t, qcow2), "a.qcow2", image.FormatQcow2, 2 << 30},
		{"b.raw.gz", gzipped(t, raw), "b.raw", image.FormatRaw, 0},
		{"box.tar", packtest.Tar(t, packtest.File{Name: "readme", Data: []byte("hello")},
			packtest.File{Name: "a.qcow2", Data: qcow2}), "a.qcow2", image.FormatQcow2, 2 << 30},
	} {
		one := look(local, orasOf(t, c.title, c.content))
		require.NotEmpty(t, one.Whole, c.title)
		require.Len(t, one.Disks, 1, c.title)
		require.Equal(t, c.name, one.Disks[0].Name)
		require.Equal(t, c.format, one.Disks[0].Format, c.title)
		require.Equal(t, c.size, one.Disks[0].VirtualSize, c.title)
		require.False(t, one.Disks[0].Servable, "nobody has opened it")
	}
}
