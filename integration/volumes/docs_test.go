package volumes

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestVolumeExamples runs the examples of docs/volumes.md, one after the other.
func TestVolumeExamples(t *testing.T) {
	t.Parallel()
	rig.Need(t, "bash", "curl", "qemu-img")
	dir, raw := t.TempDir(), filepath.Join(t.TempDir(), "raw")
	rig.Pattern(t, raw, 1<<20, 1)
	rig.MakeQcow2(t, raw, filepath.Join(dir, "fedora.qcow2"), "", true)
	v := startVolumes(t, map[string]string{"DISK_DIR": dir})
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "volumes.md"))
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	require.Len(t, blocks, 5)
	home := t.TempDir()
	var out string
	for _, block := range blocks {
		script := strings.NewReplacer("http://127.0.0.1:8443", v.base, "/tmp/", home+"/",
			"curl -sS", "curl -sS --fail-with-body").Replace(block[1])
		out += rig.OK(t, "bash", "-euo", "pipefail", "-c", script)
	}
	for _, want := range []string{"lun: 64", `"lun": 64`, "size: 1073741824", "size: 2147483648",
		"image: fedora.qcow2", "mode: copy-on-write"} {
		require.Contains(t, out, want)
	}
	require.Contains(t, string(text), "lun: 64\n", "the answer that is shown")
	require.Contains(t, rig.OK(t, "curl", "-sS", "--fail-with-body", v.base+"/openapi.yaml"),
		"openapi: 3.1.0")
}
