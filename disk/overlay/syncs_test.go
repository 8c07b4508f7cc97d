package overlay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/rawfile"
)

// countedSyncs is a disk's file that counts its syncs.
type countedSyncs struct {
	*rawfile.File
	calls int
	err   error
}

func (c *countedSyncs) Sync() error { c.calls++; return c.err }

// TestSyncOfAnOverlayReachesStorage: Sync reaches storage whatever Flush promises. Destroying data
// needs that.
func TestSyncOfAnOverlayReachesStorage(t *testing.T) {
	const size = 1 << 20
	dir := t.TempDir()
	image := openGood(t, filetest.Put(t, dir, "image.raw", filetest.Block(1, size), size))
	file, err := rawfile.Open(filetest.Put(t, dir, "disk.raw", nil, size), rawfile.Options{})
	require.NoError(t, err)
	defer file.Close()
	f := &countedSyncs{File: file}
	blocks := newBlockMap(blocksOf(size))
	maps := newMapStore(len(blocks.pages))
	held, err := markHoles(t.Context(), image, blocks, maps.save)
	require.NoError(t, err)
	o := newDisk(f, image, blocks, maps, held, Options{})
	require.NoError(t, o.Flush())
	require.Zero(t, f.calls)
	require.NoError(t, o.Sync())
	require.Equal(t, 1, f.calls)
	f.err = disk.ErrFailed
	require.ErrorIs(t, o.Sync(), disk.ErrFailed)
	require.ErrorIs(t, o.Sync(), disk.ErrFailed)
}
