package registry

import (
	"encoding/json"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// FuzzIndex reads anything as an index: everything in an accepted index lies where it says.
func FuzzIndex(f *testing.F) {
	h, _ := v1.NewHash(digestOf(nil))
	layers := []v1.Descriptor{{Digest: h, Size: 1 << 20}}
	x := &index{
		Version:   1,
		ChunkSize: indexChunk,
		Files: []indexFile{{Name: "disk/a", Size: 300 << 10, Offset: 512,
			Layer: h.String(), Metadata: [][2]int64{{0, 512}}}},
	}
	text, _ := json.Marshal(x)
	f.Add(text, 64)
	f.Fuzz(func(t *testing.T, text []byte, chunks int) {
		layer := tarOf(
			t,
			tarFile{name: indexName, content: text},
			tarFile{name: chunksName, content: make([]byte, min(max(chunks, 0), 1<<16))},
		)
		x, err := parseIndex(layer, layers)
		if err != nil {
			return
		}
		for _, f := range x.Files {
			if f.Offset < 0 || f.Offset+f.Size > 1<<20 || f.FirstChunk < 0 ||
				(f.FirstChunk+f.chunks(x.ChunkSize))*digestSize > int64(
					len(x.chunks),
				) || !strings.HasPrefix(f.Name, "disk/") {
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
