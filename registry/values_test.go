package registry

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/transport"
)

// TestManyValues: JSON of an image that somebody has saved takes no more memory than its length
// allows: values of two bytes take a hundred each as Go has them.
func TestManyValues(t *testing.T) {
	many := "[" + strings.Repeat("{},", 100_000) + "{}]"
	saved := func(manifest, config string) string {
		file := filepath.Join(t.TempDir(), "saved.tar")
		require.NoError(t, os.WriteFile(file, tarOf(t,
			tarFile{Name: "manifest.json", Content: []byte(manifest)},
			tarFile{Name: "config.json", Content: []byte(config)},
			tarFile{Name: "layer.tar", Content: tarOf(t)}), 0o600))
		return "docker-archive:" + file
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "oci-layout"), []byte("{}"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "index.json"),
		fmt.Appendf(nil, `{"schemaVersion":2,"manifests":%s}`, many), 0o600))
	const one = `[{"Config":"config.json","Layers":["layer.tar"]}]`
	for name, text := range map[string]string{
		"manifest": saved(many, "{}"),
		"history":  saved(one, `{"history":`+many+`,"rootfs":{"diff_ids":[]}}`),
		"index":    "oci:" + dir,
	} {
		ref, err := transport.ParseReference(text)
		require.NoError(t, err)
		_, err = pull(t, ref, PullOptions{})
		require.ErrorContains(t, err, "more than 65536 values", name)
	}
	for name, change := range map[string]func(config []byte) error{
		"extend": func(config []byte) error { _, err := extendConfig(config, nil, 0); return err },
		"reduce": func(config []byte) error { _, err := reduceConfig(config, nil); return err },
	} {
		config := `{"history":` + many + `,"rootfs":{"type":"layers","diff_ids":[]}}`
		require.ErrorContains(t, change([]byte(config)), "more than 65536 values", name)
	}
}
