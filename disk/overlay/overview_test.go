package overlay

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/internal/testtool"
)

// sparseFile opens an empty file of that size as the file of an overlay.
func sparseFile(t testing.TB, size int64) *rawfile.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	f := testtool.Must(os.Create(path))(t)
	require.NoError(t, f.Truncate(size))
	require.NoError(t, f.Close())
	return testtool.Must(rawfile.Open(path, rawfile.Options{Private: true}))(t)
}

// TestMapOfAnOverlay follows a disk from its image to a complete one.
func TestMapOfAnOverlay(t *testing.T) {
	const size, block = 64 * minGranule, minGranule
	content := make([]byte, size)
	for i := range content[:32*block] { // the second half is a hole
		content[i] = byte(i) | 1
	}
	img := filetest.SimImage{Content: content}
	// As large again as the image: that part is a hole, too.
	o := over(t, sparseFile(t, 2*size), img, Options{})
	defer o.Close()

	cell := func(m *disk.Map, i int64) disk.Cell { return m.Cells[i*block/m.CellBytes] }
	m := o.Map()
	require.Equal(t, int64(block), m.CellBytes)
	require.Equal(t, disk.Cell{Image: 32 * block, Hole: 96 * block}, m.Total())
	require.Equal(t, disk.Cell{Image: block}, cell(m, 31))
	require.Equal(t, disk.Cell{Hole: block}, cell(m, 32))

	filetest.Write(t, o, make([]byte, disk.SectorSize), 3*block)
	// The file remembers its holes by 64 KiB.
	filetest.Write(t, o, make([]byte, 16*block), 48*block)
	filetest.Write(t, o, make([]byte, 16*block), 96*block)
	require.NoError(t, testtool.Err(o.ReadAt(t.Context(), make([]byte, block), 7*block)))
	m = o.Map()
	require.Equal(t, disk.Cell{Image: 31 * block, Written: 33 * block, Hole: 64 * block,
		Read: true}, m.Total())
	require.Equal(t, disk.Cell{Written: block}, cell(m, 3))
	require.Equal(t, disk.Cell{Written: block}, cell(m, 111))
	require.Equal(t, disk.Cell{Image: block, Read: true}, cell(m, 7))

	require.NoError(t, o.Discard(t.Context(), 10*block, 2*block))
	require.NoError(t, o.Discard(t.Context(), 48*block, block))
	require.Equal(t, disk.Cell{Image: 29 * block, Written: 32 * block, Hole: 67 * block,
		Read: true}, o.Map().Total())

	require.NoError(t, o.Copy(t.Context(), CopyOptions{Slots: slots.New(1, slots.Options{})}))
	m = o.Map()
	sum := m.Total()
	sum.Read = false
	require.Equal(t, disk.Cell{Copied: 29 * block, Written: 32 * block, Hole: 67 * block}, sum)
	require.Equal(t, disk.Cell{Copied: block}, cell(m, 0))
	require.NoError(t, o.dropMaps())
	o.base.drop()
	again := o.Map().Total()
	again.Read = false
	require.Equal(t, sum, again)
}

// TestCountClearAgainstAModel compares counts with single bits, in pages that are missing, full and
// in between.
func TestCountClearAgainstAModel(t *testing.T) {
	const blocks = 4*mapPageBlocks + 777
	r := rand.New(rand.NewPCG(3, 3))
	m, set := newBlockMap(blocks), make([]bool, blocks)
	mark := func(first, last int64) {
		require.NoError(t, m.set(first, last, nil))
		for i := first; i <= last; i++ {
			set[i] = true
		}
	}
	mark(mapPageBlocks, 2*mapPageBlocks-1)
	for range 40 {
		first := 2*mapPageBlocks + r.Int64N(2*mapPageBlocks+700)
		mark(first, min(blocks-1, first+r.Int64N(300)))
	}
	before := make([]int64, blocks+1) // clear blocks before each
	for i, is := range set {
		before[i+1] = before[i]
		if !is {
			before[i+1]++
		}
	}
	for range 2000 {
		first := r.Int64N(blocks)
		last := first + r.Int64N(blocks-first)
		require.Equal(t, before[last+1]-before[first], m.countClear(first, last), "%d to %d", first,
			last)
	}
	require.Equal(t, before[blocks], m.countClear(0, blocks-1))
}

// endless is an image that is all data.
type endless struct{ size int64 }

func (e endless) Size() int64   { return e.size }
func (e endless) Parallel() int { return 1 }

func (e endless) ReadAt(_ context.Context, p []byte, _ int64) (int, error) {
	clear(p)
	return len(p), nil
}

func (e endless) Extent(_ context.Context, _, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// BenchmarkMap asks for the large map of the largest disk that ext4 holds, 16 TiB less a block, in
// several states of copying.
func BenchmarkMap(b *testing.B) {
	const size = 16<<40 - 4<<10
	r := rand.New(rand.NewPCG(1, 1))
	patterns := []struct {
		name string
		word func(page, word int) uint64
	}{
		{"new", nil},
		{"half copied in order", func(page, _ int) uint64 { return -uint64(page >> 12 & 1) }},
		{"every other block", func(int, int) uint64 { return 0x5555555555555555 }},
		{"random blocks", func(int, int) uint64 { return r.Uint64() }},
		{"random runs", func(_, word int) uint64 { return -(r.Uint64() >> (word % 64) & 1) }},
		{"complete", func(int, int) uint64 { return ^uint64(0) }},
	}
	for _, pattern := range patterns {
		b.Run(pattern.name, func(b *testing.B) {
			blocks := newBlockMap(blocksOf(size))
			buf := make([]byte, mapPageSize)
			for page := range blocks.pages {
				if pattern.word == nil {
					break
				}
				for word := range mapPageWords {
					binary.LittleEndian.PutUint64(buf[word*8:], pattern.word(page, word))
				}
				blocks.mergePage(int64(page), buf)
			}
			o := newDisk(sparseFile(b, size), endless{size}, blocks,
				newMapStore(len(blocks.pages)), size, Options{})
			defer o.Close()
			for range 1000 { // a guest that is all over the disk
				off := r.Int64N(size/minGranule) * minGranule
				require.NoError(b, testtool.Err(o.WriteAt(b.Context(), buf, off)))
			}
			b.ReportAllocs()
			for b.Loop() {
				require.Len(b, o.Map().Cells, disk.MaxMapCells)
			}
		})
	}
}
