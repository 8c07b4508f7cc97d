package target

import (
	"net"
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

// conn4 is a connection with only a peer's address.
type conn4 struct {
	net.Conn
	addr net.Addr
}

func (c conn4) RemoteAddr() net.Addr { return c.addr }

func TestSource(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.7":              "192.0.2.7",
		"::ffff:192.0.2.7":       "192.0.2.7",
		"2001:db8:1:2:3:4:5:6":   "2001:db8:1:2::",
		"2001:db8:1:2:ffff::":    "2001:db8:1:2::",
		"fe80::1":                "fe80::",
		"2001:db8:1:3:3:4:5:6":   "2001:db8:1:3::",
		"::1":                    "::",
		"64:ff9b::192.0.2.33":    "64:ff9b::",
		"2001:db8:ffff:ffff::12": "2001:db8:ffff:ffff::",
	} {
		got := sourceOf(conn4{addr: &net.TCPAddr{IP: net.ParseIP(in), Port: 1}})
		require.Equal(t, want, got.String(), in)
	}
	require.Equal(t, "fe80::",
		sourceOf(conn4{addr: &net.TCPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0"}}).String())
	require.False(t, sourceOf(conn4{addr: &net.UnixAddr{}}).IsValid())
}

func TestWhoMakesRoom(t *testing.T) {
	p := pendingConns{from: make(map[netip.Addr]int)}
	add := func(from string, began bool) *conn {
		c := &conn{source: netip.MustParseAddr(from)}
		c.began.Store(began)
		p.add(c)
		return c
	}
	lone := add("192.0.2.1", false)
	early := add("192.0.2.2", true)
	silent := add("192.0.2.2", false)
	late := add("192.0.2.2", true)
	require.Same(t, silent, p.takeVictim(), "of the address with the most, one that has not begun")
	require.Same(t, early, p.takeVictim(), "otherwise the oldest one")
	require.Same(t, lone, p.takeVictim())
	p.remove(late)
	p.remove(late)
	require.Nil(t, p.takeVictim())
	require.Empty(t, p.from)
	require.Zero(t, p.order.Len())
}
