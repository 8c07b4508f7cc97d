package overlay

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
)

// instant is a file whose calls take no time.
type instant struct{ size int64 }

func (f instant) ReadAt(ctx context.Context, p []byte, _ int64) (int, error)  { return len(p), nil }
func (f instant) WriteAt(ctx context.Context, p []byte, _ int64) (int, error) { return len(p), nil }
func (f instant) Flush() error                                                { return nil }
func (f instant) Sync() error                                                 { return nil }
func (f instant) Size() int64                                                 { return f.size }
func (f instant) Close() error                                                { return nil }
func (f instant) Discard(_ context.Context, _, _ int64) error                 { return nil }
func (f instant) Zero(_ context.Context, _, _ int64) error                    { return nil }

func (f instant) Extent(ctx context.Context, _, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// ownBlocks makes a disk whose file has all blocks but some, so that no page of the map is full.
func ownBlocks(tb testing.TB) (over *Disk, blocks int64) {
	const size = 64 << 20
	m := newBlockMap(blocksOf(size))
	require.NoError(tb, m.set(0, m.blocks/2-1, nil))
	img := filetest.SimImage{Content: make([]byte, size)}
	return newDisk(instant{size}, img, m, newMapStore(len(m.pages)), size, Options{}), m.blocks / 2
}

// TestOwnBlocksAllocateNothing: reading and writing blocks of the file allocates nothing.
func TestOwnBlocksAllocateNothing(t *testing.T) {
	over, blocks := ownBlocks(t)
	p := make([]byte, 8*minGranule)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		_, _ = over.ReadAt(t.Context(), p, (blocks-8)*minGranule)
		_, _ = over.WriteAt(t.Context(), p, minGranule/2)
	}))
}
