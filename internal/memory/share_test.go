package memory

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestShares: a client has what there is. Once all of that is in use, others still have their part.
func TestShares(t *testing.T) {
	const limit = 8 << 20
	p := New(limit)
	greedy, other, third := p.Join("greedy"), p.Join("other"), p.Join("third")
	require.Same(t, greedy, p.Join("greedy"), "of its next connection")
	take := func(s *Share) (all []*Buffer) {
		for b := s.Get(256 << 10); b != nil; b = s.Get(256 << 10) {
			all = append(all, b)
		}
		return all
	}
	first := take(greedy)
	require.Len(t, first, 32)
	require.Nil(t, p.Get(512), "all is in use")
	require.Len(t, take(other), 2, "a third of a quarter")
	late := third.Must(1 << 20)
	require.Nil(t, third.Get(512), "it has more than its part")
	late.Leave()
	require.NotNil(t, third.Get(512), "others have that buffer in their limit")
	late.Release()
	for range 2 {
		require.Len(t, p.shares, 3)
		greedy.Part()
	}
	require.Len(t, p.shares, 2)
	for _, b := range first {
		b.Release()
	}
	require.NotNil(t, p.Get(512))
	require.Zero(t, greedy.used.Load())
	(*Share)(nil).Part()

	crowded := New(4 << 20)
	for i := range 100 {
		crowded.Join(fmt.Sprint("idle", i))
	}
	crowded.Charge(4 << 20)
	one := crowded.Join("one")
	require.NotNil(t, one.Get(leastShare), "everybody can read")
	require.Nil(t, one.Get(512))
	require.Nil(t, one.Get(Max+1))
}
