package registry

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// tarFile is an entry of a layer that a test makes.
type tarFile struct {
	name    string
	content []byte
	kind    byte // 0: a file
	link    string
}

func tarOf(t testing.TB, files ...tarFile) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{
			Name:     f.name,
			Mode:     0o444,
			Size:     int64(len(f.content)),
			Typeflag: f.kind,
			Linkname: f.link,
		}
		if f.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		require.NoError(t, w.WriteHeader(h))
		_, err := w.Write(f.content)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return b.Bytes()
}

func gzipped(t testing.TB, p []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write(p)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.Bytes()
}

func zstandard(t testing.TB, p []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	return w.EncodeAll(p, nil)
}

// store is the content of a registry or of a layout, by digest.
type store map[string][]byte

func (s store) add(content []byte) v1.Descriptor {
	digest := digestOf(content)
	s[digest] = content
	h, _ := v1.NewHash(digest)
	return v1.Descriptor{Digest: h, Size: int64(len(content))}
}

// image makes a manifest of layers, the lowest first, and returns its descriptor.
func (s store) image(t testing.TB, layers ...[]byte) v1.Descriptor {
	t.Helper()
	m := v1.Manifest{
		SchemaVersion: 2,
		MediaType:     types.OCIManifestSchema1,
		Config:        s.add([]byte("{}")),
	}
	m.Config.MediaType = types.OCIConfigJSON
	for _, l := range layers {
		desc := s.add(l)
		desc.MediaType = types.OCILayer // whatever it is: media types lie
		m.Layers = append(m.Layers, desc)
	}
	return s.manifest(t, m)
}

func (s store) manifest(t testing.TB, m any) v1.Descriptor {
	t.Helper()
	text, err := json.Marshal(m)
	require.NoError(t, err)
	desc := s.add(text)
	desc.MediaType = types.OCIManifestSchema1
	return desc
}

// layout writes an OCI layout of one image, and returns its reference.
func (s store) layout(t testing.TB, image v1.Descriptor) Reference {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755))
	for digest, content := range s {
		h, err := v1.NewHash(digest)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, blobName(h)), content, 0o644))
	}
	index, err := json.Marshal(
		v1.IndexManifest{SchemaVersion: 2, Manifests: []v1.Descriptor{image}},
	)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644))
	ref, err := ParseReference("oci:" + dir)
	require.NoError(t, err)
	return ref
}

// noise is content that does not compress, with holes in it; the same for the same seed.
func noise(seed uint64, size int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	p := make([]byte, size)
	for off := 0; off+8 <= size; off += 8 {
		if off>>16%4 != 1 {
			binary.LittleEndian.PutUint64(p[off:], r.Uint64())
		}
	}
	return p
}

// qemuImg runs it in a directory.
func qemuImg(t testing.TB, dir string, args ...string) {
	t.Helper()
	testtool.Need(t, "qemu-img")
	cmd := exec.Command("qemu-img", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "qemu-img %v: %s", args, out)
}

// qcow2Of is an image with that content.
func qcow2Of(t testing.TB, content []byte, options ...string) []byte {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), content, 0o644))
	qemuImg(
		t,
		dir,
		append(
			append([]string{"convert", "-f", "raw", "-O", "qcow2"}, options...),
			"raw",
			"image",
		)...)
	image, err := os.ReadFile(filepath.Join(dir, "image"))
	require.NoError(t, err)
	return image
}

func newClient(t testing.TB, opt Options) *Client {
	t.Helper()
	c, err := New(opt)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// onlyFile checks that the directory has one file, with that content.
func onlyFile(t testing.TB, dir, name string, want []byte) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "%v", entries)
	require.Equal(t, name, entries[0].Name())
	got, err := os.ReadFile(filepath.Join(dir, name))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got), "%s has another content", name)
}

func emptyDir(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func platformOf(arch string) *v1.Platform { return &v1.Platform{OS: "linux", Architecture: arch} }

func otherArch() string {
	if runtime.GOARCH == "arm64" {
		return "amd64"
	}
	return "arm64"
}

// usedBytes is how much space a file takes.
func usedBytes(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	return st.Blocks * 512
}
