package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// FuzzIndex reads anything as an index: everything in an accepted index lies where it says.
func FuzzIndex(f *testing.F) {
	h, _ := v1.NewHash(transport.DigestOf(nil))
	layers := []v1.Descriptor{{Digest: h, Size: 1 << 20}}
	x := &Index{
		Version:   1,
		ChunkSize: IndexChunk,
		Files: []IndexFile{{Name: "disk/a", Size: 300 << 10, Offset: 512,
			Layer: h.String(), Metadata: [][2]int64{{0, 512}}}},
	}
	text, _ := json.Marshal(x)
	f.Add(text, 64)
	keep := testtool.Must(os.Create(filepath.Join(f.TempDir(), "index")))(f)
	defer keep.Close()
	f.Fuzz(func(t *testing.T, text []byte, chunks int) {
		layer := registrytest.TarOf(t, registrytest.TarFile{Name: indexName, Content: text},
			registrytest.TarFile{Name: chunksName,
				Content: make([]byte, min(max(chunks, 0), 1<<16))})
		x, err := ParseIndex(bytes.NewReader(layer), layers, keep)
		if err != nil {
			return
		}
		for _, f := range x.Files {
			if f.Offset < 0 || f.Offset+f.Size > 1<<20 || f.FirstChunk < 0 ||
				(f.FirstChunk+f.Chunks(x.ChunkSize))*DigestSize > x.Digests.Size() ||
				!strings.HasPrefix(f.Name, "disk/") {
				t.Fatalf("%+v", f)
			}
			for _, m := range f.Metadata {
				if m[0] < 0 || m[1] < 1 || m[0]+m[1] > f.Size {
					t.Fatalf("%+v", f)
				}
			}
		}
	})
}

// FuzzLayer reads anything as the tar archive of a layer. Files that it shows lie in the directory,
// and Go's own reader finds the same files there.
func FuzzLayer(f *testing.F) {
	f.Add(registrytest.TarOf(f, registrytest.TarFile{Name: "disk/a", Content: []byte("x")},
		registrytest.TarFile{Name: "disk/.wh.b"},
		registrytest.TarFile{Name: "disk/c", Kind: tar.TypeLink, Link: "disk/a"}))
	f.Add(registrytest.TarOf(f, registrytest.TarFile{Name: "./disk/../x"},
		registrytest.TarFile{Name: ".wh..wh..opq"}))
	f.Fuzz(func(t *testing.T, layer []byte) {
		var read int64
		list, err := ReadTar(
			bytes.NewReader(layer),
			DiskDir,
			func(e *Entry, content io.Reader) error {
				n, err := io.Copy(io.Discard, io.LimitReader(content, 1<<20))
				read += n
				return err
			},
		)
		if err != nil {
			return
		}
		s := NewShadow()
		for name := range list.Entries {
			if !s.Shows(name) || !Under(DiskDir, name) || strings.Contains("/"+name+"/", "/../") {
				t.Fatal(name)
			}
		}
		if err := s.Add(list); err == nil {
			for name := range list.Entries {
				if s.Shows(name) {
					t.Fatalf("%q shows twice", name)
				}
			}
		}
	})
}

// TestHashEnds ends the hashing of a file while goroutines still hash parts of it: by a file that
// has become shorter, and by an interruption. One processor makes them run after the error.
func TestHashEnds(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	path := filepath.Join(t.TempDir(), "a.raw")
	for name, c := range map[string]struct {
		stop bool
		size int64 // that the file has by then
		want string
	}{
		"shorter":     {size: 3*hashStep + 5, want: "become shorter"},
		"empty":       {want: "become shorter"},
		"interrupted": {stop: true, size: 8 * hashStep, want: "canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.WriteFile(path, registrytest.Noise(1, 8*hashStep), 0o600))
			f := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
			defer f.Close()
			l := testtool.Must(NewDisk("disk/a.raw", f))(t)
			require.NoError(t, f.Truncate(c.size))
			for range 20 {
				ctx := t.Context()
				if c.stop {
					ctx = &endsAfter{Context: ctx, calls: 3}
				}
				require.ErrorContains(t, testtool.Err(l.Hash(ctx, new(atomic.Int64))), c.want)
			}
		})
	}
}

// endsAfter is a context that ends at a certain call of Err.
type endsAfter struct {
	context.Context
	calls int
}

func (e *endsAfter) Err() error {
	if e.calls--; e.calls < 0 {
		return context.Canceled
	}
	return nil
}

// TestComparisonEnds: a few bytes of a layer may be gigabytes of zeros. A comparison that must end
// does not wait for these.
func TestComparisonEnds(t *testing.T) {
	raw := registrytest.Zstandard(t, make([]byte, 8<<20))
	ctx, cancel := context.WithCancel(t.Context())
	a := &archive{ctx: ctx, codec: codecZstd, cuts: []int64{int64(len(raw))},
		of: transport.NewBlob(descriptor{Size: int64(len(raw))},
			func(context.Context, int64, int64) io.ReadCloser {
				return io.NopCloser(bytes.NewReader(raw))
			})}
	require.NoError(t, a.open(0))
	defer a.close()
	require.NoError(t, testtool.Err(a.Read(make([]byte, 1))))
	cancel()
	require.ErrorIs(t, testtool.Err(a.Read(make([]byte, 1))), context.Canceled)
}
