package instance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestStoreGoesWithTheDisk: the store of a logical unit belongs to the content of its disk. It
// stays while the disk is kept, under any name, and goes with it.
func TestStoreGoesWithTheDisk(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", filetest.Sample(1<<20, 1), 0)
	opt := Options{WorkDir: work}

	first, _ := start(t, path, opt)
	require.NoError(t, first.Store().Save("mode-pages", []byte("x")))
	require.NoError(t, first.Close())

	opt.Identity.Serial = "another"
	again, _ := start(t, path, opt)
	require.True(t, again.kept)
	kept, err := again.Store().Load("mode-pages")
	require.NoError(t, err)
	require.Equal(t, "x", string(kept))
	require.NoError(t, again.Close())

	filetest.Put(t, dir, "disk.raw", filetest.Sample(1<<20, 2), 0)
	other, _ := start(t, path, opt)
	require.False(t, other.kept)
	require.NotEqual(t, filepath.Dir(first.Store().Where("kept")),
		filepath.Dir(other.Store().Where("kept")))
	require.NoDirExists(t, filepath.Dir(first.Store().Where("kept")))
}

func TestStoreIsAsDurableAsTheDisk(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 1), 0)
	for want, opt := range map[bool][]Options{
		true:  {{Durable: true}, {Mode: CopyNone}, {Mode: CopyOnWrite, PersistentDir: t.TempDir()}},
		false: {{}, {Mode: CopyOnWrite}},
	} {
		for _, o := range opt {
			o.WorkDir = t.TempDir()
			inst, _ := start(t, path, o)
			require.Equal(t, want, inst.durable, "%+v", o)
			require.NoError(t, inst.Close())
		}
	}
}

// TestStoreOfAnExchangedFile: the store of an image served in place does not apply to another file
// of its name. An interrupted atomic write would put blocks of one file into the other.
func TestStoreOfAnExchangedFile(t *testing.T) {
	dir := t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	opt := Options{Mode: CopyNone, WorkDir: t.TempDir()}
	first, _ := start(t, path, opt)
	require.False(t, first.kept)
	require.NoError(t, first.Store().Save("kept", []byte("x")))
	require.NoError(t, first.Close())
	for _, readOnly := range []bool{false, true, false} {
		opt.ReadOnly = readOnly
		again, logs := start(t, path, opt)
		require.True(t, again.kept)
		kept, err := again.Store().Load("kept")
		require.NoError(t, err)
		require.Equal(t, "x", string(kept))
		require.Empty(t, logs.FilterLevelExact(zap.WarnLevel).All())
		require.NoError(t, again.Close())
	}

	filetest.Put(t, dir, "new.raw", []byte("data"), 1<<20)
	require.NoError(t, os.Rename(filepath.Join(dir, "new.raw"), path))
	for i := range 2 {
		other, logs := start(t, path, opt)
		require.Equal(t, i > 0, other.kept)
		require.Equal(t, first.Identity, other.Identity)
		require.Equal(t, 1-i, logs.FilterMessageSnippet("has changed since").Len())
		kept, err := other.Store().Load("kept")
		require.NoError(t, err)
		require.Empty(t, kept)
		require.NoDirExists(t, filepath.Dir(first.Store().Where("kept")))
		require.NoError(t, other.Close())
	}
}
