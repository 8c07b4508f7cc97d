package instance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
)

// TestAFileIsADiskOrAnImage: while a guest writes to a file, nobody else takes it for an image or
// replaces it, and the other way round.
func TestAFileIsADiskOrAnImage(t *testing.T) {
	dir := t.TempDir()
	base := filetest.Put(t, dir, "base.raw", []byte("data"), 1<<20)
	other := filetest.Put(t, dir, "other.raw", []byte("other"), 1<<20)
	hold := image.Options{Hold: true}
	open := func(t *testing.T, path string) *image.Image {
		img, err := image.Open(path, hold)
		require.NoError(t, err)
		t.Cleanup(func() { img.Close() })
		return img
	}
	for name, opt := range map[string]Options{
		"in place":   {WorkDir: t.TempDir(), Mode: CopyNone},
		"persistent": {PersistentDir: t.TempDir(), Mode: CopyClone},
		"ephemeral":  {WorkDir: t.TempDir(), Mode: CopyOnWrite},
	} {
		t.Run(name, func(t *testing.T) {
			inst, err := Open(t.Context(), open(t, base), opt)
			require.NoError(t, err)
			if opt.Mode == CopyClone {
				settle(t, inst)
			}
			_, err = image.Open(inst.path, hold)
			require.ErrorContains(t, err, "in use by another process")
			before, err := os.Stat(inst.path)
			require.NoError(t, err)
			err = image.Convert(t.Context(), open(t, other), inst.path, nil)
			require.ErrorAs(t, err, new(*durable.LockedError))
			after, err := os.Stat(inst.path)
			require.NoError(t, err)
			require.True(t, os.SameFile(before, after))
			require.NoError(t, inst.Close())
			open(t, inst.path).Close()
		})
	}
	below := open(t, base)
	_, err := Open(t.Context(), open(t, base), Options{WorkDir: t.TempDir(), Mode: CopyNone})
	require.ErrorAs(t, err, new(*durable.LockedError), "somebody reads it as an image")
	require.ErrorAs(t, image.Convert(t.Context(), open(t, other), base, nil),
		new(*durable.LockedError))
	require.NoError(t, below.Close())
	require.NoError(t, image.Convert(t.Context(), open(t, other), base, nil))
	require.NoFileExists(t, filepath.Join(dir, "base.raw"+durable.PartialSuffix))
}
