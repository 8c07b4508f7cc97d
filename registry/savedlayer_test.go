package registry

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
)

// TestSavedWithCompressedLayers: crane and others compress the layers of an archive, whose
// configuration has the digests of what is inside.
func TestSavedWithCompressedLayers(t *testing.T) {
	content := noise(96, 1<<20)
	layer := tarOf(t, tarFile{Name: "disk/a.raw", Content: content})
	digest, err := v1.NewHash(digestOf(layer))
	require.NoError(t, err)
	config, err := json.Marshal(v1.ConfigFile{Architecture: "amd64", OS: "linux",
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{digest}}})
	require.NoError(t, err)
	wrong := gzipped(t, tarOf(t, tarFile{Name: "disk/a.raw", Content: flipped(content, 5)}))
	for name, c := range map[string]struct {
		layer []byte
		want  string
	}{
		"plain": {layer: layer}, "gzip": {layer: gzipped(t, layer)},
		"zstd":          {layer: zstandard(t, layer)},
		"wrong content": {wrong, "the content of " + digest.String()},
		"cut":           {gzipped(t, layer)[:1000], "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			index := `[{"Config": "config.json", "RepoTags": ["vm:1"], "Layers": ["l.tar.gz"]}]`
			file := filepath.Join(t.TempDir(), "a.tar")
			require.NoError(t, os.WriteFile(file, tarOf(t,
				tarFile{Name: "config.json", Content: config},
				tarFile{Name: "l.tar.gz", Content: c.layer},
				tarFile{Name: "manifest.json", Content: []byte(index)}), 0o644))
			dir, err := pull(t, parsed(t, "docker-archive:"+file), PullOptions{})
			if c.want != "" {
				require.ErrorContains(t, err, c.want)
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", content)
		})
	}
}
