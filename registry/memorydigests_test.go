package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/transport"
)

// hugeIndexed is an image with an index of a disk of so many zeros.
func hugeIndexed(t testing.TB, size int64) transport.Reference {
	sum := sha256.Sum256(make([]byte, indexChunk))
	disk := v1.Descriptor{MediaType: types.OCILayer, Size: size,
		Digest: v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%064d", 1)}}
	text, err := json.Marshal(&index{Version: indexVersion, ChunkSize: indexChunk,
		Files: []indexFile{{Name: "disk/a.raw", Size: size, Layer: disk.Digest.String()}}})
	require.NoError(t, err)
	s := store{}
	above := s.Add(tarOf(t, tarFile{Name: indexName, Content: text}, tarFile{Name: chunksName,
		Content: bytes.Repeat(sum[:], int(size/indexChunk))}))
	above.MediaType = types.OCILayer
	above.Annotations = map[string]string{annotationIndex: "1"}
	ref := layoutOf(t, s, s.Manifest(t, v1.Manifest{SchemaVersion: 2,
		MediaType: types.OCIManifestSchema1, Config: s.Add([]byte("{}")),
		Layers: []v1.Descriptor{disk, above}}))
	name := filepath.Join(dirOf(ref), filepath.Join("blobs", "sha256", disk.Digest.Hex))
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	require.NoError(t, os.Truncate(name, size))
	return ref
}

// TestMemoryOfDigests: the digests of a large disk stay in files, also at a later start.
func TestMemoryOfDigests(t *testing.T) {
	ref := hugeIndexed(t, 512<<30)
	c := newClient(t, transport.Options{})
	s := newStreaming(t, c, t.TempDir(), t.TempDir())
	for range 2 {
		slim(t, 24<<20, func() {
			st, err := c.Stream(t.Context(), ref, s.opt)
			require.NoError(t, err)
			defer st.Close()
			img, err := st.Open(t.Context(), "a.raw", image.Options{})
			require.NoError(t, err)
			defer img.Close()
			_, err = img.ReadAt(t.Context(), make([]byte, 4096), 300<<30)
			require.NoError(t, err)
		})
	}
}

// TestMemoryOfLinks: the chunks of a file with many names are stored and loaded once.
func TestMemoryOfLinks(t *testing.T) {
	ref := manyNames(t, 1<<15, 15)
	c := newClient(t, transport.Options{})
	s := newStreaming(t, c, t.TempDir(), t.TempDir())
	for range 2 {
		slim(t, 48<<20, func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := c.Stream(ctx, ref, s.opt) // the chunks are wrong, so its disks cannot be read
			require.Error(t, err)
		})
	}
}

// TestMemoryOfKeptBlob: a kept index is verified without being in memory.
func TestMemoryOfKeptBlob(t *testing.T) {
	k, err := keep(nil, filepath.Join(t.TempDir(), "kept"))
	require.NoError(t, err)
	defer k.dir.Close()
	h := sha256.New()
	_, err = io.CopyN(h, zeroReader{}, maxIndexLayer)
	require.NoError(t, err)
	digest, err := v1.NewHash(transport.DigestIn(h))
	require.NoError(t, err)
	name := filepath.Join(k.dir.Name(), keptName(digest.String()))
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	require.NoError(t, os.Truncate(name, maxIndexLayer))
	slim(t, 8<<20, func() {
		b, err := k.Blob(v1.Descriptor{Digest: digest, Size: maxIndexLayer})
		require.NoError(t, err)
		require.Equal(t, digest, b.Desc.Digest)
	})
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestMemoryOfIndex: an index is refused before what it claims takes memory.
func TestMemoryOfIndex(t *testing.T) {
	digest := v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("0", 64)}
	layers := []v1.Descriptor{{Digest: digest, Size: 1 << 30}}
	whole := func(file string) string {
		return `{"version":1,"chunkSize":262144,"files":[` + file + `]}`
	}
	many := func(piece string) string {
		const size = 8 << 20
		return strings.Repeat(piece+",", size/len(piece)-1) + piece
	}
	one, err := json.Marshal(indexFile{Name: "disk/a", Size: indexChunk, Layer: digest.String()})
	require.NoError(t, err)
	for _, c := range []struct {
		name, text, want string
		digests          int
	}{
		{"files", whole(many("{}")), "more than 1024 files", 0},
		{"ranges", whole(`{"metadata":[` + many("[]") + `]}`), "more than 1048576 ranges", 0},
		{"runs", whole(`{"boot":[` + many("[]") + `]}`), "more than 65536 runs", 0},
		{"a long range", whole(`{"boot":[[` + many("1") + `]]}`), "value of more than", 0},
		{"an unknown key", `{"x":[` + many("{}") + `]}`, "value of more than", 0},
		{"digests", whole(string(one)), "and its files have 1 chunks", 1 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			layer := tarOf(t, tarFile{Name: indexName, Content: []byte(c.text)},
				tarFile{Name: chunksName, Content: make([]byte, c.digests*digestSize)})
			slim(t, 64<<20, func() {
				_, err := parseIndex(bytes.NewReader(layer), layers, nil)
				require.ErrorContains(t, err, c.want)
			})
		})
	}
}
