package registrytest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TarFile is an entry of a layer that a test makes.
type TarFile struct {
	Name    string
	Content []byte
	Kind    byte // 0: a file
	Link    string
	Hole    int64 // zeros behind its content that the archive leaves out, as "tar -S" does
}

// sparseHeader is the header of a file with a hole (GNU tar's manual, "Old GNU Format"). Package
// archive/tar reads such files, and writes none.
func (f TarFile) sparseHeader() []byte {
	h, data, size := make([]byte, 512), int64(len(f.Content)), int64(len(f.Content))+f.Hole
	number := func(at int, n int64) {
		h[at] = 0x80 // in binary
		binary.BigEndian.PutUint64(h[at+4:], uint64(n))
	}
	copy(h, f.Name)
	copy(h[100:], "0000444\x000000000\x000000000\x00")
	number(124, data)
	copy(h[136:], "00000000000\x00        S")
	copy(h[257:], "ustar  \x00")
	for i, n := range []int64{0, data, size, 0} { // what is there: offset and length
		number(386+12*i, n)
	}
	number(483, size)
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return h
}

func TarOf(t testing.TB, files ...TarFile) []byte {
	t.Helper()
	var b bytes.Buffer
	size := 4096
	for _, f := range files {
		size += len(f.Content) + 2048
	}
	b.Grow(size) // the race detector makes it dear to grow on the way
	w := tar.NewWriter(&b)
	for _, f := range files {
		if f.Hole > 0 {
			require.NoError(t, w.Flush())
			b.Write(f.sparseHeader())
			b.Write(f.Content)
			b.Write(make([]byte, -len(f.Content)&511))
			continue
		}
		h := &tar.Header{
			Name:     f.Name,
			Mode:     0o444,
			Size:     int64(len(f.Content)),
			Typeflag: f.Kind,
			Linkname: f.Link,
		}
		if f.Kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		require.NoError(t, w.WriteHeader(h))
		require.NoError(t, testtool.Err(w.Write(f.Content)))
	}
	require.NoError(t, w.Close())
	return b.Bytes()
}

func Gzipped(t testing.TB, p []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	b.Grow(len(p) + len(p)/1000 + 1024)
	w := gzip.NewWriter(&b)
	require.NoError(t, testtool.Err(w.Write(p)))
	require.NoError(t, w.Close())
	return b.Bytes()
}

func Zstandard(t testing.TB, p []byte) []byte {
	t.Helper()
	w := testtool.Must(zstd.NewWriter(nil))(t)
	return w.EncodeAll(p, nil)
}

// Store is the content of a registry or of a layout, by digest.
type Store map[string][]byte

func (s Store) Add(content []byte) v1.Descriptor {
	digest := fmt.Sprintf("sha256:%x", sha256.Sum256(content))
	s[digest] = content
	h, _ := v1.NewHash(digest)
	return v1.Descriptor{Digest: h, Size: int64(len(content))}
}

// Image makes a manifest of layers, the lowest first, and returns its descriptor.
func (s Store) Image(t testing.TB, layers ...[]byte) v1.Descriptor {
	t.Helper()
	m := v1.Manifest{
		SchemaVersion: 2,
		MediaType:     types.OCIManifestSchema1,
		Config:        s.Add([]byte("{}")),
	}
	m.Config.MediaType = types.OCIConfigJSON
	for _, l := range layers {
		desc := s.Add(l)
		desc.MediaType = types.OCILayer // whatever it is: media types lie
		m.Layers = append(m.Layers, desc)
	}
	return s.Manifest(t, m)
}

func (s Store) Manifest(t testing.TB, m any) v1.Descriptor {
	t.Helper()
	text := testtool.Must(json.Marshal(m))(t)
	desc := s.Add(text)
	desc.MediaType = types.OCIManifestSchema1
	return desc
}

// Layout writes an OCI layout of one image, and returns its directory.
func (s Store) Layout(t testing.TB, image v1.Descriptor) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755))
	for digest, content := range s {
		h := testtool.Must(v1.NewHash(digest))(t)
		file := filepath.Join(dir, "blobs", "sha256", h.Hex)
		require.NoError(t, os.WriteFile(file, content, 0o644))
	}
	index := testtool.Must(json.Marshal(
		v1.IndexManifest{SchemaVersion: 2, Manifests: []v1.Descriptor{image}},
	))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644))
	return dir
}

// Noise is content that does not compress, with holes in it; the same for the same seed. The race
// detector would look at each byte, which nobody else has yet.
//
//go:norace
func Noise(seed uint64, size int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	p := make([]byte, size)
	for off := 0; off+8 <= size; off += 8 {
		if off>>16%4 != 1 {
			binary.LittleEndian.PutUint64(p[off:], r.Uint64())
		}
	}
	return p
}

// QemuImg runs it in a directory.
func QemuImg(t testing.TB, dir string, args ...string) {
	t.Helper()
	testtool.Need(t, "qemu-img")
	cmd := exec.Command("qemu-img", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "qemu-img %v: %s", args, out)
}

// Qcow2Of is an image with that content.
func Qcow2Of(t testing.TB, content []byte, options ...string) []byte {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), content, 0o644))
	QemuImg(t, dir,
		append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, options...), "raw",
			"image")...)
	image := testtool.Must(os.ReadFile(filepath.Join(dir, "image")))(t)
	return image
}

// PlainLayer is a layer as "oras push" makes it of a file.
func (s Store) PlainLayer(content []byte, mediaType types.MediaType, title string) v1.Descriptor {
	desc := s.Add(content)
	desc.MediaType = mediaType
	if title != "" {
		desc.Annotations = map[string]string{"org.opencontainers.image.title": title}
	}
	return desc
}

// Artifact makes a manifest of such layers.
func (s Store) Artifact(t testing.TB, layers ...v1.Descriptor) v1.Descriptor {
	config := s.Add([]byte("{}"))
	config.MediaType = "application/vnd.oci.empty.v1+json"
	return s.Manifest(t, v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: config, Layers: layers, ArtifactType: "application/vnd.unknown.artifact.v1"})
}
