package overlay

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// TestCopyingToAFullVolumeTakesNothing: if the space is too small for a chunk, copying leaves it to
// the guest and to the small files beside the disk.
func TestCopyingToAFullVolumeTakesNothing(t *testing.T) {
	const size = 4 << 20
	full := filetest.TinyFS(t, "1536k")
	img := openGood(t, filetest.Put(t, t.TempDir(), "a.raw", filetest.Block('a', size), 0))
	file, err := rawfile.Open(filetest.Put(t, full, "disk.img", nil, size),
		rawfile.Options{Private: true})
	require.NoError(t, err)
	defer file.Close()
	blocks := newBlockMap(blocksOf(size))
	maps := newMapStore(len(blocks.pages))
	over := newDisk(file, img, blocks, maps, size, Options{})
	filetest.Write(t, over, filetest.Block('b', 64<<10), 1<<20)
	progress := new(image.Progress)
	h := newHydration(over, CopyOptions{Slots: slots.New(4, slots.Options{}), Progress: progress})
	slot, err := h.slots.Acquire(t.Context())
	require.NoError(t, err)
	defer slot.Release()
	for range 5 {
		_, _ = h.step(t.Context(), slot)
	}
	require.True(t, h.paused.Load())
	require.True(t, progress.Waiting())
	require.EqualValues(t, (size-1<<20-64<<10)/minGranule, blocks.clear.Load(),
		"one chunk has found space")
	left, err := osfile.AvailableSpace(full)
	require.NoError(t, err)
	require.EqualValues(t, 512<<10-64<<10, left)
	require.NoError(t, durable.Replace(filepath.Join(full, "state"), filetest.Block('s', 4096),
		"", nil))
	filetest.Write(t, over, filetest.Block('c', 256<<10), 3<<20)
	want := filetest.Block('a', size)
	copy(want[1<<20:], filetest.Block('b', 64<<10))
	copy(want[3<<20:], filetest.Block('c', 256<<10))
	require.Equal(t, -1, filetest.FirstDifference(want, filetest.ReadAll(t, over, size)))
}

// TestHolesThatCannotBeSaved: the image has more holes than at the last start, and that cannot be
// saved. The disk still reads as before.
func TestHolesThatCannotBeSaved(t *testing.T) {
	const size = 3 * mapPageBlocks * minGranule
	img := openGood(t, filetest.Put(t, t.TempDir(), "a.raw", filetest.Block('a', 1<<20), size))
	m := newBlockMap(blocksOf(size))
	full := fmt.Errorf("%w: %w", disk.ErrNoSpace, unix.ENOSPC)
	stored, err := markHoles(t.Context(), img, m, func(page, _ int64, _ []byte) error {
		if page > 0 {
			return full
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, m.clear.Load()*minGranule, stored, "nothing is copied yet")
	require.EqualValues(t, 2*mapPageBlocks*minGranule+1<<20, stored)
	broken := func(int64, int64, []byte) error { return unix.EIO }
	_, err = markHoles(t.Context(), img, newBlockMap(blocksOf(size)), broken)
	require.ErrorIs(t, err, unix.EIO)
}
