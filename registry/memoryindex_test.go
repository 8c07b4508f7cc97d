package registry

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
)

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
