package bitset

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSet compares a set with a map.
func TestSet(t *testing.T) {
	var s Set
	want := map[int64]bool{}
	for _, n := range []int64{0, 63, 64, 1000, 64, 127, 128} {
		require.Equal(t, want[n], s.Has(n), n)
		s.Add(n)
		want[n] = true
	}
	s.Remove(64)
	delete(want, 64)
	for n := range int64(2000) {
		require.Equal(t, want[n], s.Has(n), n)
	}
	require.Equal(t, []int64{0, 63, 127, 128, 1000}, slices.Collect(s.All()))
	require.EqualValues(t, 5, s.Len())
	var runs []int64
	for at, n := int64(0), int64(0); at < 1100; at += n {
		var has bool
		has, n = s.Run(at, 1100)
		require.Equal(t, len(runs)%2 == 0, has)
		runs = append(runs, n)
	}
	require.Equal(t, []int64{1, 62, 1, 63, 2, 871, 1, 99}, runs)
	for range s.All() {
		break // a caller need not take all of them
	}
}

func TestAddShared(t *testing.T) {
	s := New(65)
	s.AddShared(64)
	require.Equal(t, []int64{64}, slices.Collect(s.All()))
	require.Panics(t, func() { s.AddShared(128) })
}
