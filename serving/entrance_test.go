package serving

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
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
	require.Equal(t, []string{"silent"}, out,
		"of the source with the most, one that has not begun")
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
	first, err := come("a", false)
	require.NoError(t, err)
	require.NoError(t, e.Admit(first, "a", false), "it is one already")
	_, err = come("a", false)
	require.NoError(t, err)
	refused, err := come("a", false)
	require.ErrorIs(t, err, ErrPeerCrowded)
	_, err = come("b", false)
	require.NoError(t, err, "another one has room")
	_, err = come("c", false)
	require.ErrorIs(t, err, ErrCrowded)
	again, err := come("a", true)
	require.NoError(t, err)
	for range 2 {
		e.Leave(first)
		e.Leave(again)
	}
	require.NoError(t, e.Admit(refused, "a", false), "there is room again")
	require.Equal(t, 1, e.Strangers())
}
