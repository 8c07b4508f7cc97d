package serving

import (
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

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
		got := SourceOf(conn4{addr: &net.TCPAddr{IP: net.ParseIP(in), Port: 1}})
		require.Equal(t, want, got.String(), in)
	}
	require.Equal(t, "fe80::",
		SourceOf(conn4{addr: &net.TCPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0"}}).String())
	require.False(t, SourceOf(conn4{addr: &net.UnixAddr{}}).IsValid())
}

// TestWhoMakesRoom: of the connections whose peer has not introduced itself, the source with the
// most gives up one for the next one that comes.
func TestWhoMakesRoom(t *testing.T) {
	e := NewEntrance(Crowd{Strangers: 4})
	var out []string
	add := func(name, from string, began bool) *Arrival {
		a := &Arrival{Source: from, PushOut: func() { out = append(out, name) }}
		a.Began.Store(began)
		e.Arrive(a)
		return a
	}
	add("lone", "192.0.2.1", false)
	add("early", "192.0.2.2", true)
	add("silent", "192.0.2.2", false)
	late := add("late", "192.0.2.2", true)
	require.Empty(t, out)
	add("next", "192.0.2.3", false)
	require.Equal(t, []string{"silent"}, out, "of the source with the most, one that has not begun")
	require.True(t, e.MakeRoom())
	require.Equal(t, "early", out[1], "otherwise the oldest one")
	require.True(t, e.MakeRoom())
	require.Equal(t, "lone", out[2])
	e.Leave(late)
	e.Leave(late)
	require.True(t, e.MakeRoom())
	require.Equal(t, "next", out[3])
	require.False(t, e.MakeRoom())
	require.Empty(t, e.from)
	require.Zero(t, e.Strangers())
}

// TestOnePeerDoesNotTakeAll: a peer has its limit of sessions, and all together have one. A session
// that takes the place of another one is not refused.
func TestOnePeerDoesNotTakeAll(t *testing.T) {
	e := NewEntrance(Crowd{Sessions: 3, PerPeer: 2})
	come := func(peer string, replaces bool) (*Arrival, error) {
		a := &Arrival{}
		e.Arrive(a)
		return a, e.Admit(a, peer, replaces)
	}
	first := testtool.Must(come("a", false))(t)
	require.NoError(t, e.Admit(first, "a", false), "it is one already")
	require.NoError(t, testtool.Err(come("a", false)))
	refused, err := come("a", false)
	require.ErrorIs(t, err, ErrPeerCrowded)
	require.NoError(t, testtool.Err(come("b", false)), "another one has room")
	require.ErrorIs(t, testtool.Err(come("c", false)), ErrCrowded)
	again := testtool.Must(come("a", true))(t)
	for range 2 {
		e.Leave(first)
		e.Leave(again)
	}
	require.NoError(t, e.Admit(refused, "a", false), "there is room again")
	require.Equal(t, 1, e.Strangers())
}

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
