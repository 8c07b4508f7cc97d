package memory

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReceive: what connections receive in takes at most a quarter of the limit.
func TestReceive(t *testing.T) {
	p := New(64 << 10)
	a := p.Receive(16 << 10)
	require.Len(t, a.B, 16<<10)
	require.Nil(t, p.Receive(512))
	a.Release()
	b := p.Get(16 << 10) // it may be the same one
	require.NotNil(t, p.Receive(16<<10))
	b.Release()
	require.Nil(t, p.Receive(512), "another buffer than those that are received in was released")
}

// TestWindows: few clients have the windows that they want, and many have narrow ones. A window
// that is closed is there for others.
func TestWindows(t *testing.T) {
	p := New(1024 * 4 * RequestCost)
	require.Equal(t, 128, p.OpenWindow(128))
	require.Equal(t, (1024-128)/8, p.OpenWindow(128))
	require.Equal(t, 5, p.OpenWindow(5))
	for p.OpenWindow(128) > narrowWindow {
	}
	p.CloseWindow(128)
	require.Greater(t, p.OpenWindow(128), narrowWindow)
}

// TestLimit: buffers and what is charged share one limit, and Must goes over it.
func TestLimit(t *testing.T) {
	p := New(4096)
	a := p.Get(1000)
	require.Len(t, a.B, 1000)
	require.EqualValues(t, 1024, p.Used(), "powers of two")
	require.Nil(t, p.Get(4096))
	require.Nil(t, p.Get(Max+1))
	p.Charge(2048)
	require.True(t, p.Scarce())
	require.Nil(t, p.Get(1025))
	b := p.Must(1025)
	require.True(t, p.Exhausted())
	b.Release()
	a.Release()
	(*Buffer)(nil).Release()
	p.Charge(-2048)
	require.Zero(t, p.Used())
	require.NotNil(t, New(Max).Get(Max))
}

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
