package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// pull fetches into a new directory, as the file "out.raw" unless dest says something else.
func pull(t testing.TB, ref transport.Reference, opt PullOptions) (dir string, err error) {
	t.Helper()
	dir = t.TempDir()
	_, _, err = newClient(t, transport.Options{}).Pull(context.Background(), ref,
		filepath.Join(dir, "out.raw"), opt)
	return dir, err
}

// brings pulls an image, which must become one file with that content.
func brings(t testing.TB, c *Client, ref transport.Reference, opt PullOptions, want []byte) {
	t.Helper()
	dir := t.TempDir()
	_, _, err := c.Pull(context.Background(), ref, filepath.Join(dir, "out.raw"), opt)
	require.NoError(t, err)
	onlyFile(t, dir, "out.raw", want)
}

// TestPullFormats fetches a disk out of each kind of layer, raw and qcow2 inside.
func TestPullFormats(t *testing.T) {
	content := noise(1, 3<<20+512)
	insides := map[string][]byte{
		"disk.img":   content,
		"a.qcow2":    qcow2Of(t, content),
		"zlib.qcow2": qcow2Of(t, content, "-c"),
		"zstd.qcow2": qcow2Of(t, content, "-c", "-o", "compression_type=zstd"),
		"disk":       content,
	}
	packings := map[string]func(testing.TB, []byte) []byte{
		"plain": func(_ testing.TB, p []byte) []byte { return p }, "gzip": gzipped,
		"zstd": zstandard,
	}
	for name, inside := range insides {
		for packing, pack := range packings {
			t.Run(name+"/"+packing, func(t *testing.T) {
				layer := tarOf(t, tarFile{Name: "etc/passwd", Content: []byte("root")},
					tarFile{Name: "disk/", Kind: tar.TypeDir},
					tarFile{Name: "./disk/" + name, Content: inside},
					tarFile{Name: "usr/x", Content: []byte("x")})
				below := tarOf(t, tarFile{Name: "bin/sh", Content: []byte("#!")})
				ref := imageOf(t, gzipped(t, below), pack(t, layer))
				c := newClient(t, transport.Options{})
				brings(t, c, ref, PullOptions{}, content)
				brings(t, c, ref, PullOptions{Original: true}, inside)

				var stdout bytes.Buffer
				done, _ := testtool.Must2(c.Pull(t.Context(), ref, "-",
					PullOptions{Stdout: &stdout}))(t)
				require.True(t, bytes.Equal(content, stdout.Bytes()))
				require.Equal(t, int64(len(content)), done[0].Size)
			})
		}
	}
}

// TestPullIsSparse: zeros take no space.
func TestPullIsSparse(t *testing.T) {
	content := make([]byte, 64<<20)
	copy(content[32<<20:], noise(2, 64<<10))
	ref := imageOf(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content})))
	dir := testtool.Must(pull(t, ref, PullOptions{}))(t)
	onlyFile(t, dir, "out.raw", content)
	require.Less(t, usedBytes(t, filepath.Join(dir, "out.raw")), int64(2<<20))
}

// TestPullLayers: pull fetches the files that a runtime would show.
func TestPullLayers(t *testing.T) {
	a, b := noise(3, 8192), noise(4, 8192)
	disk := func(name string, p []byte) tarFile { return tarFile{Name: name, Content: p} }
	for name, c := range map[string]struct {
		layers [][]tarFile // the lowest first
		path   string
		want   []byte // nil: an error
		err    string
	}{
		"upper replaces": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{disk("disk/x.img", b)}}, want: b},
		"later replaces": {layers: [][]tarFile{{disk("disk/x.img", a),
			disk("disk/x.img", b)}}, want: b},
		"whiteout": {layers: [][]tarFile{{disk("disk/x.img", a),
			disk("disk/y.img", b)}, {disk("disk/.wh.x.img", nil)}}, want: b},
		"whiteout of all": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{disk(".wh.disk", nil)}}, err: "has no disk"},
		"whiteout, same layer": {layers: [][]tarFile{{disk("disk/.wh.x.img", nil),
			disk("disk/x.img", a)}}, want: a},
		"opaque": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{disk("disk/.wh..wh..opq", nil), disk("disk/y.img", b)}}, want: b},
		"opaque root": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{disk(".wh..wh..opq", nil), disk("disk/y.img", b)}}, want: b},
		"opaque elsewhere": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{disk("etc/.wh..wh..opq", nil)}}, want: a},
		"directory over file": {layers: [][]tarFile{{disk("disk/x.img", a),
			disk("disk/y.img", b)}, {{Name: "disk/x.img", Kind: tar.TypeDir}}}, want: b},
		"file over directory": {layers: [][]tarFile{{disk("disk/x.img", a)}, {disk("disk", b)}},
			err: "a file in place of the directory"},
		"link in place of disk": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{{Name: "disk", Kind: tar.TypeSymlink, Link: "etc"}}}, err: "a symbolic link"},
		"hard link": {layers: [][]tarFile{{disk("disk/.hidden/x", a),
			{Name: "disk/x.img", Kind: tar.TypeLink, Link: "disk/.hidden/x"}}}, want: a},
		"hard link from outside": {layers: [][]tarFile{{disk("images/x", a),
			{Name: "disk/x.img", Kind: tar.TypeLink, Link: "./images/x"}}}, want: a},
		"hard link to nothing": {layers: [][]tarFile{{disk("images/x", a)},
			{{Name: "disk/x.img", Kind: tar.TypeLink, Link: "images/x"}}}, err: "hard link"},
		"symbolic link": {layers: [][]tarFile{{disk("images/x", a),
			{Name: "disk/x.img", Kind: tar.TypeSymlink, Link: "../images/x"}}},
			err: "a symbolic link"},
		"symbolic link over it": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{{Name: "disk/x.img", Kind: tar.TypeSymlink, Link: "y"}}}, err: "a symbolic link"},
		"device": {layers: [][]tarFile{{{Name: "disk/x.img", Kind: tar.TypeBlock}}},
			err: "a device"},
		"other directory": {layers: [][]tarFile{{disk("diskette/x.img", a),
			disk("disks", b)}}, err: "has no disk"},
		"two disks": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{disk("disk/y.img", b)}}, err: `2 disks: choose one with --path`},
		"two disks, one named": {layers: [][]tarFile{{disk("disk/x.img", a)},
			{disk("disk/y.img", b)}}, path: "x.img", want: a},
		"a path elsewhere": {layers: [][]tarFile{{disk("images/x.img", a)}},
			path: "/images/x.img", want: a},
		"a path that is not": {layers: [][]tarFile{{disk("disk/x.img", a)}}, path: "y.img",
			err: `has no file "disk/y.img"`},
		"nothing": {layers: [][]tarFile{{disk("etc/passwd", a)}},
			err: "has no disk"},
		"odd size": {layers: [][]tarFile{{disk("disk/x.img", a[:1000])}},
			err: "not a multiple of 512"},
		"text": {layers: [][]tarFile{{disk("disk/readme", []byte("read me\n"))}},
			err: "text file"},
		"another format": {layers: [][]tarFile{
			{disk("disk/x.vmdk", append([]byte("KDMV"), a...))}}, err: "VMDK"},
		"a footer": {layers: [][]tarFile{
			{disk("disk/x.img",
				append(bytes.Clone(a), append([]byte("conectix"), make([]byte, 504)...)...))}},
			err: "VHD"},
		"compressed inside": {layers: [][]tarFile{
			{disk("disk/x.img", append([]byte("\xfd7zXZ\x00"), a...))}}, err: "xz"},
		"empty": {layers: [][]tarFile{{disk("disk/x.img", nil)}}, err: "is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			var layers [][]byte
			for _, files := range c.layers {
				layers = append(layers, gzipped(t, tarOf(t, files...)))
			}
			dir, err := pull(t, imageOf(t, layers...), PullOptions{Path: c.path})
			if c.want == nil {
				require.ErrorContains(t, err, c.err)
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", c.want)
		})
	}
}

// TestPullDirectory fetches several disks, with a chain of backing files among them.
func TestPullDirectory(t *testing.T) {
	work := t.TempDir()
	base, other := noise(5, 4<<20), noise(6, 1<<20)
	require.NoError(t, os.WriteFile(filepath.Join(work, "base.img"), base, 0o644))
	qemuImg(t, work, "create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw", "middle.qcow2",
		"6M")
	qemuImg(t, work, "create", "-q", "-f", "qcow2", "-b", "middle.qcow2", "-F", "qcow2",
		"top.qcow2", "5M")
	file := func(name string) tarFile {
		p := bytesOf(t, filepath.Join(work, name))
		return tarFile{Name: "disk/" + name, Content: p}
	}
	want := make([]byte, 5<<20)
	copy(want, base)
	ref := imageOf(t,
		gzipped(t, tarOf(t, file("base.img"), tarFile{Name: "disk/other.img", Content: other})),
		tarOf(t, file("top.qcow2")), zstandard(t, tarOf(t, file("middle.qcow2"))))
	dir := t.TempDir()
	c := newClient(t, transport.Options{})
	done, digest := testtool.Must2(c.Pull(t.Context(), ref, dir, PullOptions{}))(t)
	require.Len(t, done, 2, "what is below another disk is none of its own")
	require.Len(t, digest, 71)
	require.True(t, bytes.Equal(want, bytesOf(t, filepath.Join(dir, "top.raw"))))
	require.True(t, bytes.Equal(other, bytesOf(t, filepath.Join(dir, "other.img"))))
	require.Len(t, namesIn(t, dir), 2)

	brings(t, c, ref, PullOptions{Path: "top.qcow2"}, want)

	ref = imageOf(t, tarOf(t, tarFile{Name: "disk/base.raw", Content: base},
		tarFile{Name: "disk/base.qcow2", Content: bytesOf(t, filepath.Join(work, "middle.qcow2"))},
		file("base.img"), file("middle.qcow2")))
	_, _, err := c.Pull(t.Context(), ref, dir, PullOptions{})
	require.ErrorContains(t, err, `"disk/base.raw" and "disk/base.qcow2" would both be`)
	require.Len(t, namesIn(t, dir), 2)
}

// TestPullLate fetches a qcow2 file with a table behind the data that it maps. The layer is read
// again.
func TestPullLate(t *testing.T) {
	work := t.TempDir()
	content := noise(7, 8<<20)
	require.NoError(t, os.WriteFile(filepath.Join(work, "raw"), content, 0o644))
	qemuImg(t, work, "convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k", "raw", "image")
	qemuImg(t, work, "resize", "-q", "image", "16G")
	inside := bytesOf(t, filepath.Join(work, "image"))
	ref := imageOf(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.qcow2", Content: inside})))
	dir := testtool.Must(pull(t, ref, PullOptions{}))(t)
	f := testtool.Must(os.Open(filepath.Join(dir, "out.raw")))(t)
	defer f.Close()
	got := make([]byte, len(content))
	require.NoError(t, testtool.Err(f.ReadAt(got, 0)))
	require.True(t, bytes.Equal(content, got))
}

// TestPullKeeps: an existing file stays unless it should be replaced, even if that fails.
func TestPullKeeps(t *testing.T) {
	content := noise(10, 1<<20)
	layer := tarOf(t, tarFile{Name: "disk/a.img", Content: content})
	ref, bad := imageOf(t, layer), imageOf(t, layer[:1<<19])
	dir := t.TempDir()
	dest := filepath.Join(dir, "out.raw")
	require.NoError(t, os.WriteFile(dest, []byte("mine"), 0o644))
	c := newClient(t, transport.Options{})
	_, _, err := c.Pull(context.Background(), ref, dest, PullOptions{})
	require.ErrorContains(t, err, "--force")
	gone := testtool.Must(transport.ParseReference("oci:" + filepath.Join(dir, "gone")))(t)
	_, _, err = c.Pull(context.Background(), gone, dest, PullOptions{})
	require.ErrorContains(t, err, "--force", "nothing is asked before")
	onlyFile(t, dir, "out.raw", []byte("mine"))
	_, _, err = c.Pull(context.Background(), bad, dest, PullOptions{Replace: true})
	require.Error(t, err)
	onlyFile(t, dir, "out.raw", []byte("mine"))
	_, _, err = c.Pull(context.Background(), ref, dest, PullOptions{Replace: true})
	require.NoError(t, err)
	onlyFile(t, dir, "out.raw", content)
}

// TestPullPlatform takes the manifest of this machine's platform. If there is none, the error lists
// the others.
func TestPullPlatform(t *testing.T) {
	s := store{}
	content := noise(11, 8192)
	mine := s.Image(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content}))
	mine.Platform = platformOf(runtime.GOARCH)
	other := s.Image(t, tarOf(t, tarFile{Name: "disk/b.img", Content: content}))
	other.Platform = platformOf(otherArch())
	attestation := other
	attestation.Platform = &v1.Platform{OS: "unknown", Architecture: "unknown"}
	index := func(m ...v1.Descriptor) transport.Reference {
		return layoutOf(t, s, indexOf(t, s, "", m...))
	}
	brings(t, newClient(t, transport.Options{}), index(attestation, other, mine), PullOptions{},
		content)
	dir, err := pull(t, index(other, attestation), PullOptions{})
	require.ErrorContains(t, err, "only for: linux/"+otherArch()+"; name one")
	emptyDir(t, dir)
	_, err = pull(t, layoutOf(t, s,
		s.Manifest(t, map[string]any{"schemaVersion": 1, "mediaType": "application/x"})),
		PullOptions{})
	require.ErrorContains(t, err, `"application/x"`)
}

// TestPullBounded: an archive that claims too much is soon an error.
func TestPullBounded(t *testing.T) {
	many := make([]tarFile, maxShown+1)
	for i := range many {
		many[i] = tarFile{Name: fmt.Sprintf("disk/many/%d", i)}
	}
	s := store{}
	huge := s.Add([]byte("small"))
	huge.Size = 1 << 40
	var pax bytes.Buffer // a file of 1 TiB without any of its content
	require.NoError(t, tar.NewWriter(&pax).WriteHeader(&tar.Header{Name: "disk/a.img",
		Typeflag: tar.TypeReg, Size: 1 << 40, Format: tar.FormatPAX}))
	bomb := tarOf(t, tarFile{Name: "disk/a.img", Content: make([]byte, 64<<20)})
	for name, c := range map[string]struct {
		image v1.Descriptor
		want  string
	}{
		"many files": {s.Image(t, gzipped(t, tarOf(t, many...))), "more than"},
		"PAX size":   {s.Image(t, gzipped(t, pax.Bytes())), "of 1099511627776 bytes"},
		"gzip bomb":  {s.Image(t, gzipped(t, bomb)), "limit"},
		"no layers":  {s.Image(t), "no layers"},
		"empty":      {s.Image(t, nil), "empty"},
		"no tar":     {s.Image(t, noise(12, 4096)), "tar archive"},
		"huge claim": {s.Manifest(t, v1.Manifest{MediaType: types.OCIManifestSchema1, Config: huge,
			Layers: []v1.Descriptor{huge}}), "the manifest says"},
		"virtual": {s.Image(t,
			tarOf(t, tarFile{Name: "disk/a.qcow2", Content: qcow2Of(t, noise(13, 8192))})),
			"limit"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := pull(t, layoutOf(t, s, c.image),
				PullOptions{Image: image.Options{MaxVirtualSize: 4096}})
			require.ErrorContains(t, err, c.want)
			emptyDir(t, dir)
		})
	}
}

// TestPullSparseTar fetches a file that the archive has without its holes.
func TestPullSparseTar(t *testing.T) {
	testtool.Need(t, "tar")
	for _, format := range []string{"gnu", "posix"} {
		dir := t.TempDir()
		require.NoError(t, os.Mkdir(filepath.Join(dir, "disk"), 0o755))
		content := make([]byte, 8<<20)
		copy(content[1<<20:], noise(14, 8192))
		copy(content[5<<20:], noise(15, 8192))
		f := testtool.Must(os.Create(filepath.Join(dir, "disk", "a.img")))(t)
		require.NoError(t, f.Truncate(int64(len(content))))
		for _, off := range []int64{1 << 20, 5 << 20} {
			require.NoError(t, testtool.Err(f.WriteAt(content[off:off+8192], off)))
		}
		require.NoError(t, f.Close())
		out, err := exec.Command("tar", "-C", dir, "-S", "--format="+format, "-cf",
			filepath.Join(dir, "layer"), "disk").CombinedOutput()
		require.NoError(t, err, "%s", out)
		layer := bytesOf(t, filepath.Join(dir, "layer"))
		require.Less(t, len(layer), 1<<20, "tar has found no holes")
		brings(t, newClient(t, transport.Options{}), imageOf(t, layer), PullOptions{}, content)
	}
}

// TestPullBesideAHole: a file that nobody wants may say that it has an exabyte of zeros.
func TestPullBesideAHole(t *testing.T) {
	content := noise(16, 1<<20)
	ref := imageOf(t, tarOf(t,
		tarFile{Name: "disk/.notes", Content: content[:700], Hole: 1 << 59},
		tarFile{Name: "disk/a.img", Content: content}))
	brings(t, newClient(t, transport.Options{}), ref, PullOptions{}, content)
}
