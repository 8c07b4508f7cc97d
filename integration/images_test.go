package integration

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// makeRaw makes a raw image with data in every other MiB and holes between. It is the same in every
// run.
func makeRaw(t *testing.T, path string, size int64) {
	t.Helper()
	makeRawSeed(t, path, size, 1)
}

func makeRawSeed(t *testing.T, path string, size int64, seed uint64) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	file, err := os.Create(path)
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, file.Truncate(size))
	chunk := make([]byte, 64<<10)
	random := rand.New(rand.NewPCG(seed, 0))
	for off := int64(0); off < size; off += 2 << 20 {
		// Half is random and half is text, so that it is partly compressible.
		for i := range chunk {
			chunk[i] = byte(random.UintN(256))
			if i >= len(chunk)/2 {
				chunk[i] = "kubevirt"[i%8]
			}
		}
		_, err := file.WriteAt(chunk[:min(int64(len(chunk)), size-off)], off)
		require.NoError(t, err)
	}
	require.NoError(t, file.Close())
}

// makeQcow2 converts a raw image with qemu-img. options are for its -o.
func makeQcow2(t *testing.T, raw, path, options string, compress bool) {
	t.Helper()
	args := []string{"convert", "-f", "raw", "-O", "qcow2"}
	if options != "" {
		args = append(args, "-o", options)
	}
	if compress {
		args = append(args, "-c")
	}
	ok(t, "qemu-img", append(args, raw, path)...)
}

// diskDir makes an image directory with one raw image of this size.
func diskDir(t *testing.T, size int64) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	makeRaw(t, filepath.Join(dir, "disk.raw"), size)
	return dir
}
