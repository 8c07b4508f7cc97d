package target

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func testPenalties() *penalties {
	return &penalties{limit: 2 * time.Second, table: make(map[netip.Addr]penalty)}
}

func TestPenaltyGrowsAndEnds(t *testing.T) {
	p := testPenalties()
	from, neighbour := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	now := int64(time.Hour) // the server has run for long
	var delays []time.Duration
	for range 10 {
		delays = append(delays, p.delay(from, now)/time.Millisecond)
		p.failed(from, now)
		now += int64(time.Second)
	}
	require.Equal(t, []time.Duration{0, 0, 0, 100, 200, 400, 800, 1600, 2000, 2000}, delays)
	require.Zero(t, p.delay(neighbour, now))
	for range 1000 {
		p.failed(from, now)
	}
	require.Equal(t, 2*time.Second, p.delay(from, now), "nobody is locked out")
	now += int64(penaltyMemory) + 1
	require.Zero(t, p.delay(from, now))
	p.failed(from, now)
	require.Zero(t, p.delay(from, now), "old failures do not count")
}

func TestPenaltiesAreBounded(t *testing.T) {
	p := testPenalties()
	address := func(i int) netip.Addr {
		return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	for i := range 3 * maxPenalties {
		for range freeFailures {
			p.failed(address(i), int64(i+1))
		}
		require.LessOrEqual(t, len(p.table), maxPenalties)
	}
	require.Zero(t, p.delay(address(0), 1), "the address with the oldest failure is forgotten")
	require.Positive(t, p.delay(address(3*maxPenalties-1), 3*maxPenalties))
	p.failed(address(0), 2*int64(penaltyMemory))
	require.Len(t, p.table, 1, "expired addresses go first")
}
