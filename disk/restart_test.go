package disk

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A disk is as large as it has ever been, whether it or its file was made so, and is never made smaller.
func TestRestartWithAnotherSize(t *testing.T) {
	path := put(t, t.TempDir(), "a.raw", sample(3<<20, 1), 0)
	for _, mode := range []CopyMode{CopyOnWrite, CopyClone} {
		opt := OpenOptions{PersistentDir: t.TempDir(), Mode: mode}
		next := func(size, want int64, grown bool) {
			t.Helper()
			opt.Size = size
			inst, _ := start(t, path, opt)
			require.Equal(t, want, inst.Size())
			require.Equal(t, grown, inst.Grown)
			p := make([]byte, 512)
			_, err := inst.ReadAt(p, want-512)
			require.NoError(t, err)
			_, err = inst.WriteAt(p, want-512)
			require.NoError(t, err)
			require.NoError(t, inst.Close())
		}
		next(0, 3<<20, false)
		next(5<<20, 5<<20, true)
		next(0, 5<<20, false)
		require.NoError(t, os.Truncate(filepath.Join(opt.PersistentDir, PersistentName), 6<<20-100))
		next(0, 6<<20, true)
		for _, size := range []int64{4 << 20, 6<<20 - 512} {
			opt.Size = size
			_, err := Open(t.Context(), openImage(t, path), opt)
			var refused *SizeError
			require.ErrorAs(t, err, &refused)
			require.ErrorContains(t, err, "never made smaller")
		}
		next(0, 6<<20, false)
	}
}
