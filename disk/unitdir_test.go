package disk

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a logical unit keeps belongs to the content of its disk: it stays while the disk is kept, and goes with it.
func TestUnitDirGoesWithTheDisk(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	path := put(t, dir, "disk.raw", sample(1<<20, 1), 0)
	opt := OpenOptions{WorkDir: work}

	first, _ := start(t, path, opt)
	require.False(t, first.Durable())
	require.Equal(t, filepath.Join(work, "disk.raw"), filepath.Dir(first.UnitDir()))
	kept := filepath.Join(first.UnitDir(), "mode-pages")
	require.NoError(t, os.MkdirAll(first.UnitDir(), 0o755))
	require.NoError(t, os.WriteFile(kept, []byte("x"), 0o600))
	require.NoError(t, first.Close())

	again, _ := start(t, path, opt)
	require.True(t, again.Kept)
	require.Equal(t, first.UnitDir(), again.UnitDir())
	require.FileExists(t, kept)
	require.NoError(t, again.Close())

	put(t, dir, "disk.raw", sample(1<<20, 2), 0)
	other, _ := start(t, path, opt)
	require.False(t, other.Kept)
	require.NotEqual(t, first.UnitDir(), other.UnitDir())
	require.NoFileExists(t, kept)
}

func TestDurableInstance(t *testing.T) {
	dir := t.TempDir()
	path := put(t, dir, "disk.raw", sample(1<<20, 1), 0)
	expanded, _ := start(t, path, OpenOptions{WorkDir: t.TempDir(), Durable: true})
	require.True(t, expanded.Durable())
	inPlace, _ := start(t, path, OpenOptions{WorkDir: t.TempDir(), Mode: CopyNone})
	require.True(t, inPlace.Durable())
}
