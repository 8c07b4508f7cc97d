package registry

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLocalImagesThatAreNone: if there is no such image on this machine, the error says what is
// wrong and what to write instead.
func TestLocalImagesThatAreNone(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.Mkdir(at("empty"), 0o755))
	require.NoError(t, os.Mkdir(at("none"), 0o755))
	require.NoError(t, os.WriteFile(at("file"), nil, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(at("none"), "index.json"),
		[]byte(`{"schemaVersion":2,"manifests":[]}`), 0o644))
	client := newClient(t, Options{})
	for ref, want := range map[string][]string{
		"oci:" + at("missing"):            {"there is no directory", at("missing"), "skopeo copy"},
		"oci:" + at("missing") + ":web":   {"there is no directory", at("missing") + `"`},
		"oci:" + at("file"):               {"is a file", "write docker-archive:" + at("file")},
		"oci:" + at("empty"):              {"is not an OCI layout", "index.json", at("empty")},
		"oci:" + at("none"):               {"has no images", "skopeo copy", "oci:" + at("none")},
		"oci:" + at("none") + ":web":      {"has no images", "skopeo copy", "oci:" + at("none")},
		"docker-archive:" + at("missing"): {"there is no file", at("missing"), "podman save"},
		"docker-archive:" + at("none"):    {"is a directory", "write oci:" + at("none")},
	} {
		parsed, err := ParseReference(ref)
		require.NoError(t, err)
		_, err = client.Container(context.Background(), parsed, "")
		for _, text := range want {
			require.ErrorContains(t, err, text, ref)
		}
	}
}
