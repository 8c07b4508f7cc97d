package overlay

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// depths returns the depth of each block of a disk.
func depths(t *testing.T, d disk.Layered, size int64) (all []int) {
	t.Helper()
	for off := int64(0); off < size; {
		depth, n := testtool.Must2(d.Depth(t.Context(), off, size-off))(t)
		require.Positive(t, n)
		require.LessOrEqual(t, n, size-off)
		for end := off + n; off < end; off += minGranule {
			all = append(all, depth)
		}
	}
	return all
}

// TestDepth: a disk has what was written, discarded or copied, and the image the rest that it
// stores. Where the image has a hole and the disk nothing, nobody has anything.
func TestDepth(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	blocks := (simSize + minGranule - 1) / minGranule
	want := make([]int, blocks)
	for i := range want {
		want[i] = disk.DepthImage
		if i%5 == 3 {
			want[i] = disk.DepthNone
		}
	}
	require.Equal(t, want, depths(t, d.over, simSize))

	require.NoError(t, d.over.Discard(t.Context(), 3*minGranule, minGranule)) // a hole stays one
	filetest.Write(t, d.over, filetest.Block('w', 512), minGranule+512)
	filetest.Write(t, d.over, filetest.Block('w', minGranule), 8*minGranule)
	require.NoError(t, d.over.Discard(t.Context(), 10*minGranule, 2*minGranule))
	for _, block := range []int{1, 8, 10, 11} {
		want[block] = disk.DepthOwn
	}
	require.Equal(t, want, depths(t, d.over, simSize), "a discarded block is not the image's")

	for _, r := range [][2]int64{{-1, 512}, {0, 0}, {0, -1}, {simSize - 512, 1024}} {
		require.Error(t, testtool.Err2(d.over.Depth(t.Context(), r[0], r[1])), "%d", r)
	}

	require.NoError(t, d.hydrate.run(t.Context()))
	for i := range want {
		if want[i] == disk.DepthImage {
			want[i] = disk.DepthOwn
		}
	}
	require.Equal(t, want, depths(t, d.over, simSize))
	d.over.base.drop()
	depth, n := testtool.Must2(d.over.Depth(t.Context(), 0, simSize))(t)
	require.Equal(t, disk.DepthOwn, depth, "without an image all is the disk's own")
	require.EqualValues(t, simSize, n)
}

// lostExtents is an image that cannot say what it stores.
type lostExtents struct{ filetest.SimImage }

var errLost = errors.New("lost")

func (lostExtents) Extent(context.Context, int64, int64) (disk.Extent, error) {
	return disk.Extent{}, errLost
}

// TestDepthOfALostImage: what the disk has needs no image.
func TestDepthOfALostImage(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	filetest.Write(t, d.over, filetest.Block('w', minGranule), 8*minGranule)
	d.over.base.img = lostExtents{d.image}
	require.ErrorIs(t, testtool.Err2(d.over.Depth(t.Context(), 0, minGranule)), errLost)
	depth, n := testtool.Must2(d.over.Depth(t.Context(), 8*minGranule, 4*minGranule))(t)
	require.Equal(t, disk.DepthOwn, depth)
	require.EqualValues(t, minGranule, n)
}
