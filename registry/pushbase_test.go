package registry

import (
	"archive/tar"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// baseOf is a base image with these layers, the lowest first.
func baseOf(t testing.TB, layers ...[]byte) transport.Reference {
	s := store{}
	var ids []string
	for _, l := range layers {
		ids = append(ids, digestOf(l))
	}
	text := testtool.Must(json.Marshal(map[string]any{"os": "linux",
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}}))(t)
	desc := s.Add(text)
	made := s.Image(t, layers...)
	m := testtool.Must(transport.ParseManifest(s[made.Digest.String()]))(t)
	m.Config.Digest, m.Config.Size = desc.Digest, desc.Size
	return layoutOf(t, s, s.Manifest(t, m))
}

// inContainer are the disks that a container of the image serves, in the order of their LUNs.
func inContainer(t testing.TB, c *Client, ref transport.Reference) (names []string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, testtool.Err2(c.Pull(t.Context(), ref, dir, PullOptions{Original: true})))
	for _, img := range testtool.Must(image.ScanDir(dir, image.Options{}))(t) {
		names = append(names, img.Name())
		require.NoError(t, img.Close())
	}
	return names
}

// TestPushOntoDisks: an image whose base has disks has the same LUNs by serve --image and in a
// container, and only an index that lacks none of the disks is one.
func TestPushOntoDisks(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for i, name := range []string{"disk2.raw", "disk10.raw"} {
		files = append(files, filepath.Join(dir, name))
		require.NoError(t, os.WriteFile(files[i], noise(uint64(i), 1<<20), 0o644))
	}
	program := tarOf(t, tarFile{Name: "disk/", Kind: tar.TypeDir},
		tarFile{Name: "kubevirt-disk", Content: noise(7, 100)})
	lower := tarOf(t, tarFile{Name: "disk/disk1.raw", Content: noise(8, 1<<20)})
	pushedBase := newMemory(t)
	pushes(t, pushedBase.client(t), files[1:], pushedBase.ref(t, "vm/base:1"),
		PushOptions{Base: BaseNone})

	for name, test := range map[string]struct {
		base    string
		push    []string
		indexed bool
		disks   []string
	}{
		"no disks": {baseOf(t, gzipped(t, program)).String(), files, true,
			[]string{"disk2.raw", "disk10.raw"}},
		"a disk": {baseOf(t, gzipped(t, program), gzipped(t, lower)).String(), files, false,
			[]string{"disk1.raw", "disk2.raw", "disk10.raw"}},
		"a disk that is removed": {baseOf(t, program, zstandard(t, lower),
			tarOf(t, tarFile{Name: "disk/.wh.disk1.raw"})).String(), files, true,
			[]string{"disk2.raw", "disk10.raw"}},
		"a disk that is replaced": {baseOf(t, program,
			tarOf(t, tarFile{Name: "disk/disk2.raw", Content: []byte("other")})).String(), files,
			true,
			[]string{"disk2.raw", "disk10.raw"}},
		"a link": {baseOf(t, tarOf(t, tarFile{Name: "a", Content: noise(9, 1<<20)},
			tarFile{Name: "disk/disk1.raw", Kind: tar.TypeLink, Link: "a"})).String(), files,
			false,
			[]string{"disk1.raw", "disk2.raw", "disk10.raw"}},
		"an image that was pushed": {pushedBase.ref(t, "vm/base:1").String(), files[:1], false,
			[]string{"disk2.raw", "disk10.raw"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(t)
			c := newClient(t, transport.Options{Insecure: []string{m.host, pushedBase.host}})
			ref := m.ref(t, "vm/a:1")
			pushes(t, c, test.push, ref, PushOptions{Base: test.base})
			s := newStreaming(t, c, t.TempDir(), t.TempDir())
			st := s.open(t, ref)
			require.Equal(t, test.disks, inContainer(t, c, ref))
			require.Equal(t, test.disks, namesOfDisks(st.Disks()))
			require.Equal(t, test.indexed, st.index != nil)
			img := s.disk(t, st, "disk2.raw")
			require.Equal(t, noise(0, 1<<20), contentOf(t, img))
		})
	}
}

// TestLUNsOfBuiltImage: an image that a builder made has the same order of disks, whether its files
// are read by ranges or it is fetched first.
func TestLUNsOfBuiltImage(t *testing.T) {
	layer := tarOf(t, tarFile{Name: "disk/disk10.raw", Content: noise(1, 1<<20)},
		tarFile{Name: "disk/disk9.raw", Content: noise(2, 1<<20)})
	want := []string{"disk9.raw", "disk10.raw"}
	for name, l := range map[string][]byte{"ranges": layer, "fetched": gzipped(t, layer)} {
		t.Run(name, func(t *testing.T) {
			s := store{}
			ref := layoutOf(t, s, s.Image(t, l))
			c := newClient(t, transport.Options{})
			require.Equal(t, want, inContainer(t, c, ref))
			st := newStreaming(t, c, t.TempDir(), t.TempDir()).open(t, ref)
			require.Equal(t, want, namesOfDisks(st.Disks()))
		})
	}
}
