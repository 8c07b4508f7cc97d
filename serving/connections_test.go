package serving

import (
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// visitor is a connection that serves until it is told to end.
type visitor struct {
	arrival Arrival
	nc      net.Conn
	served  chan struct{}
	end     chan struct{}
}

func (v *visitor) Arrived() *Arrival { return &v.arrival }

func (v *visitor) Serve() {
	close(v.served)
	<-v.end
}

// gate is a listener that answers what it is given.
type gate struct {
	answers chan any // an error, or a net.Conn
	closed  atomic.Bool
}

func (g *gate) Accept() (net.Conn, error) {
	switch a := (<-g.answers).(type) {
	case error:
		return nil, a
	case net.Conn:
		return a, nil
	}
	return nil, net.ErrClosed
}

func (g *gate) Close() error {
	if !g.closed.Swap(true) {
		close(g.answers)
	}
	return nil
}

func (g *gate) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: "/gate"} }

func accepting(t *testing.T) (*Connections[*visitor], *gate, chan *visitor, chan error,
	*atomic.Int32) {
	t.Helper()
	cs := NewConnections[*visitor](Crowd{}, 0)
	g, came, ended := &gate{answers: make(chan any)}, make(chan *visitor, 8), make(chan error, 1)
	warned := new(atomic.Int32)
	go func() {
		ended <- cs.Accept(g, func(nc net.Conn) *visitor {
			v := &visitor{nc: nc, served: make(chan struct{}), end: make(chan struct{})}
			v.arrival.PushOut = func() { _ = nc.Close() }
			came <- v
			return v
		}, func(error) { warned.Add(1) })
	}()
	return cs, g, came, ended, warned
}

// TestConnections: connections are served from accept to drop, and the end waits for them.
func TestConnections(t *testing.T) {
	cs, g, came, ended, _ := accepting(t)
	ours, theirs := net.Pipe()
	defer ours.Close()
	g.answers <- theirs
	v := <-came
	<-v.served
	require.Equal(t, []*visitor{v}, cs.All(func(*visitor) bool { return true }))
	require.Empty(t, cs.All(func(*visitor) bool { return false }))
	require.Equal(t, 1, cs.Strangers())
	require.Equal(t, []net.Addr{g.Addr()}, cs.Portals())
	require.False(t, cs.Closing())

	cs.Close()
	cs.Close()
	require.NoError(t, <-ended)
	require.True(t, cs.Closing())
	require.Empty(t, cs.Portals())
	stopped, stop := context.WithCancel(t.Context())
	stop()
	require.ErrorIs(t, cs.Wait(stopped), context.Canceled)
	cs.Go(func() { t.Error("nothing begins after Close") })
	late, other := net.Pipe()
	cs.Take(other, func(nc net.Conn) *visitor { return &visitor{nc: nc} })
	_, err := late.Read(make([]byte, 1))
	require.Error(t, err, "it was closed")
	require.NoError(t, cs.Accept(&gate{answers: make(chan any)}, nil, nil))

	cs.Drop(v)
	cs.Drop(v)
	require.Zero(t, cs.Strangers())
	close(v.end)
	require.NoError(t, cs.Wait(t.Context()))
}

// TestAcceptThatFails: an error that passes costs a stranger its place and one line of the log for
// all in a row. Another one ends the portal.
func TestAcceptThatFails(t *testing.T) {
	cs, g, came, ended, warned := accepting(t)
	none := &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	g.answers <- none
	g.answers <- none
	ours, theirs := net.Pipe()
	g.answers <- theirs
	v := <-came
	<-v.served
	require.EqualValues(t, 1, warned.Load())
	g.answers <- none
	_, err := ours.Read(make([]byte, 1))
	require.Error(t, err, "it had to make room")
	broken := errors.New("broken")
	g.answers <- broken
	require.ErrorIs(t, <-ended, broken)
	require.EqualValues(t, 2, warned.Load())
	require.True(t, g.closed.Load())
	close(v.end)
	require.NoError(t, cs.Wait(t.Context()))
}

// TestFailed: the first failures of a source have a line each, and then each reason has one.
func TestFailed(t *testing.T) {
	cs := NewConnections[*visitor](Crowd{}, -1)
	lines := map[string]int{}
	for range 20 {
		for _, reason := range []string{"a", "b"} {
			if more, say := cs.Failed("here", reason); say {
				require.Empty(t, more)
				lines[reason]++
			}
		}
	}
	require.Equal(t, map[string]int{"a": 2, "b": 2}, lines)
	_, slowed := cs.Delay("there", time.Now())
	require.False(t, slowed)
	_, say := cs.Failed("there", "a")
	require.True(t, say)
}
