package plan

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestChooseNumbers: an image does not get the number of a volume, and two disks with one number,
// as of a copied directory, do not stop the start.
func TestChooseNumbers(t *testing.T) {
	clash := func(lun uint16, a, b string) { t.Errorf("LUN %d: %s and %s", lun, a, b) }
	n := numbers{byImage: map[string]uint16{"m": 1}, taken: map[uint16]string{2: "the volume v"}}
	require.Equal(t, []uint16{3, 1, 4}, n.choose(named("a", "m", "z"), []uint16{0, 0, 0}, clash))
	require.Equal(t, []uint16{1, 2}, numbers{}.choose(named("a", "m"), []uint16{0, 0}, clash))
	require.Equal(t, []uint16{2, 7, 3}, numbers{byImage: map[string]uint16{"a": 2, "c": 3}}.choose(
		named("a", "b", "c"), []uint16{0, 7, 0}, clash))
	clashes := 0
	n.choose(named("a", "m"), []uint16{1, 0}, func(uint16, string, string) { clashes++ })
	require.Equal(t, 1, clashes, "the number of m was set for a")
}
