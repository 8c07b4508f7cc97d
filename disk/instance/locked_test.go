package instance

import (
	"bytes"
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
			err = image.Convert(t.Context(), open(t, other), inst.path, true, nil)
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
	require.ErrorAs(t, image.Convert(t.Context(), open(t, other), base, true, nil),
		new(*durable.LockedError))
	require.NoError(t, below.Close())
	require.NoError(t, image.Convert(t.Context(), open(t, other), base, true, nil))
	require.NoFileExists(t, filepath.Join(dir, "base.raw"+durable.PartialSuffix))
}

// TestAMovedDirectory: while a disk is served, its directory is moved, and a copy is put in its
// place. No snapshot is made or deleted in the copy, and the disk goes on where it is.
func TestAMovedDirectory(t *testing.T) {
	dir := t.TempDir()
	path, away := filepath.Join(dir, "p"), filepath.Join(dir, "away")
	base := filetest.Put(t, t.TempDir(), "base.raw", []byte("data"), 1<<20)
	opt := Options{PersistentDir: path, Mode: CopyOnWrite}
	inst, _ := start(t, base, opt)
	require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
	require.NoError(t, os.Rename(path, away))
	require.NoError(t, os.CopyFS(path, os.DirFS(away)))
	want := filetest.Block('w', 512)
	write := func(off int64) {
		filetest.Write(t, inst, want, off)
		require.NoError(t, inst.Flush())
	}
	write(0)
	const moved = "is not the directory any more"
	require.ErrorContains(t, TakeSnapshot(t.Context(), "b", inst), moved)
	require.ErrorContains(t, inst.DeleteSnapshot(t.Context(), "a"), moved)
	require.ErrorContains(t, inst.Store().Save("handover", []byte("x")), moved)
	write(512)
	require.NoError(t, os.RemoveAll(path))
	require.NoError(t, os.Rename(away, path))
	require.NoError(t, TakeSnapshot(t.Context(), "c", inst))
	write(1024)
	require.NoError(t, inst.Close())
	inst, _ = start(t, base, opt)
	require.Equal(t, bytes.Repeat([]byte("w"), 1536), filetest.ReadAll(t, inst, 1536))
	require.Len(t, inst.Snapshots(), 2)
}
