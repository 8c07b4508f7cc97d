package disk

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMapCoversTheDisk checks that the cells of a map cover the disk once, and that it can be
// folded without losing anything.
func TestMapCoversTheDisk(t *testing.T) {
	check := func(m *Map, most int) {
		require.NotEmpty(t, m.Cells)
		require.LessOrEqual(t, len(m.Cells), most)
		require.Zero(t, m.CellBytes&(m.CellBytes-1), "a power of two")
		end := int64(0)
		for i, c := range m.Cells {
			off, length := m.Range(i)
			require.Equal(t, end, off)
			require.Positive(t, length)
			require.Equal(t, Cell{Image: length, Read: off == 0}, c)
			end = off + length
		}
		require.Equal(t, m.Size, end)
	}
	for _, size := range []int64{SectorSize, 4 << 10, 1 << 20, 1<<20 + SectorSize, 10 << 30,
		10<<30 + 512, 16 << 40, 64 << 40} {
		m := NewMap(size)
		require.Equal(t, MapCellBytes(size), m.CellBytes)
		for i := range m.Cells {
			_, m.Cells[i].Image = m.Range(i)
		}
		m.Cells[0].Read = true
		check(m, MaxMapCells)
		for _, cells := range []int{1, 2, 100, 512, MaxMapCells, 1 << 30} {
			check(m.Fold(cells), cells)
		}
	}
}

func TestMapTotal(t *testing.T) {
	m := &Map{Cells: []Cell{{Image: 1, Copied: 2, Written: 3, Hole: 4}, {Image: 10, Read: true}}}
	require.Equal(t, Cell{Image: 11, Copied: 2, Written: 3, Hole: 4, Read: true}, m.Total())
}
