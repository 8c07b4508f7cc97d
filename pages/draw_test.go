package pages

import (
	"encoding/json"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
)

func TestDrawMap(t *testing.T) {
	m := &disk.Map{CellBytes: 4, Size: 28, Cells: []disk.Cell{
		{Image: 4}, {Image: 3, Copied: 1}, {Copied: 4, Read: true}, {Hole: 4, Read: true},
		{Image: 3, Written: 1}, {Image: 1, Copied: 3}, {Image: 4, Read: true},
	}}
	require.Equal(t, mapPaths{Image: "M0 0.5h2M6 0.5h1", Copied: "M2 0.5h1M5 0.5h1",
		Written: "M4 0.5h1", Read: "M2 0.5h2M6 0.5h1"}, drawMap(m, 7))
	require.Equal(t, mapPaths{Image: "M0 0.5h2M2 1.5h1", Copied: "M2 0.5h1M1 1.5h1",
		Written: "M0 1.5h1", Read: "M2 0.5h2M2 1.5h1"}, drawMap(m, 4))
}

// worstMap is a map in which no two cells side by side are alike.
func worstMap(r *rand.Rand) *disk.Map {
	m := disk.NewMap(16<<40 - 4096)
	last := -1
	for i := range m.Cells {
		c := &m.Cells[i]
		kind := r.IntN(3)
		if kind == last {
			kind = (kind + 1) % 3
		}
		last = kind
		*[]*int64{&c.Image, &c.Copied, &c.Written}[kind] = m.CellBytes
		c.Read = i%2 == 0
	}
	return m
}

// TestMapIsSmall checks that the largest map of a disk takes at most 64 KiB in a browser, as it is
// in the page and in an event.
func TestMapIsSmall(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		m := drawMap(worstMap(r), gridColumns)
		paths := map[string]string{"gi": m.Image, "gc": m.Copied, "gw": m.Written, "gr": m.Read}
		require.LessOrEqual(t, len(testtool.Must(json.Marshal(news{Path: paths}))(t)), 64<<10)
	}
}

func TestDrawArea(t *testing.T) {
	require.Empty(t, drawArea([]float64{0, 0, 0}, 0, false))
	require.Equal(t, "M0 32v0l1 -31l1 30V32z", drawArea([]float64{0, 10, .001}, 10, false))
	require.Equal(t, "M0 32v31l1 -31l1 16V32z", drawArea([]float64{10, 0, 5}, 10, true))
}
