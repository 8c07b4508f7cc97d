package optionstest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/transport"
)

// SavedImage is a container image with one layer, as docker saves it.
func SavedImage(t testing.TB) transport.Reference {
	t.Helper()
	archive := func(files ...string) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for i := 0; i < len(files); i += 2 {
			require.NoError(t, w.WriteHeader(&tar.Header{Name: files[i], Mode: 0o644,
				Size: int64(len(files[i+1]))}))
			_, err := w.Write([]byte(files[i+1]))
			require.NoError(t, err)
		}
		require.NoError(t, w.Close())
		return b.Bytes()
	}
	layer := archive("hello", "world")
	file := filepath.Join(t.TempDir(), "image.tar")
	require.NoError(t, os.WriteFile(file, archive("layer.tar", string(layer), "config.json",
		fmt.Sprintf(`{"os":"linux","architecture":"amd64","config":{"Cmd":["/hello"]},"rootfs":`+
			`{"type":"layers","diff_ids":["sha256:%x"]}}`, sha256.Sum256(layer)),
		"manifest.json", `[{"Config":"config.json","Layers":["layer.tar"]}]`), 0o644))
	ref, err := transport.ParseReference("docker-archive:" + file)
	require.NoError(t, err)
	return ref
}
