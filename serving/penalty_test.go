package serving

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPenaltyGrowsAndEnds(t *testing.T) {
	p := NewPenalties(2 * time.Second)
	now := time.Now()
	var delays []time.Duration
	for range 10 {
		delay, _ := p.Delay("a", now)
		delays = append(delays, delay/time.Millisecond)
		p.Failed("a", now)
		now = now.Add(time.Second)
	}
	require.Equal(t, []time.Duration{0, 0, 0, 100, 200, 400, 800, 1600, 2000, 2000}, delays)
	delay, slowed := p.Delay("neighbour", now)
	require.Zero(t, delay)
	require.False(t, slowed)
	for range 1000 {
		p.Failed("a", now)
	}
	delay, slowed = p.Delay("a", now)
	require.Equal(t, 2*time.Second, delay, "nobody is locked out")
	require.True(t, slowed)
	now = now.Add(penaltyMemory + 1)
	delay, slowed = p.Delay("a", now)
	require.Zero(t, delay)
	require.False(t, slowed)
	p.Failed("a", now)
	delay, _ = p.Delay("a", now)
	require.Zero(t, delay, "old failures do not count")
}

func TestPenaltiesAreBounded(t *testing.T) {
	p := NewPenalties(time.Second)
	start := time.Now()
	for i := range 3 * maxPenalties {
		for range freeFailures {
			p.Failed(strconv.Itoa(i), start.Add(time.Duration(i)))
		}
		require.LessOrEqual(t, len(p.table), maxPenalties)
	}
	delay, _ := p.Delay("0", start)
	require.Zero(t, delay, "the peer with the oldest failure is forgotten")
	delay, _ = p.Delay(strconv.Itoa(3*maxPenalties-1), start.Add(3*maxPenalties))
	require.Positive(t, delay)
	p.Failed("0", start.Add(2*penaltyMemory))
	require.Len(t, p.table, 1, "expired peers go first")
}
