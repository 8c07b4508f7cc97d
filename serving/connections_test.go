package serving

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// visitor is a connection that serves until it is told to end.
type visitor struct {
	Conn
	served chan struct{}
	end    chan struct{}
}

func (v *visitor) End(err error)                   { v.Fail(err) }
func (v *visitor) Look(time.Time, bool)            {}
func (v *visitor) Session() (status.Session, bool) { return status.Session{}, false }

func (v *visitor) Serve() {
	close(v.served)
	<-v.end
}

// door is a listener that answers what it is given.
type door struct {
	answers chan any // an error, or a net.Conn
	closed  atomic.Bool
}

func (g *door) Accept() (net.Conn, error) {
	switch a := (<-g.answers).(type) {
	case error:
		return nil, a
	case net.Conn:
		return a, nil
	}
	return nil, net.ErrClosed
}

func (g *door) Close() error {
	if !g.closed.Swap(true) {
		close(g.answers)
	}
	return nil
}

func (g *door) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: "/door"} }

func accepting(t *testing.T) (*Connections[*visitor], *door, chan *visitor, chan error,
	*observer.ObservedLogs) {
	t.Helper()
	log, warned := observer.New(zap.WarnLevel)
	cs := NewConnections[*visitor](Rules{Disks: New(Config{}), Every: time.Hour, Log: zap.New(log)})
	g, came, ended := &door{answers: make(chan any)}, make(chan *visitor, 8), make(chan error, 1)
	go func() {
		ended <- cs.Accept(g, func(nc net.Conn) *visitor {
			v := &visitor{served: make(chan struct{}), end: make(chan struct{})}
			v.Init(nc)
			came <- v
			return v
		})
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
	require.ErrorIs(t, <-ended, ErrClosed)
	require.True(t, cs.Closing())
	require.Empty(t, cs.Portals())
	stopped, stop := context.WithCancel(t.Context())
	stop()
	require.ErrorIs(t, cs.Finish(stopped), context.Canceled)
	cs.Go(func() { t.Error("nothing begins after Close") })
	late, other := net.Pipe()
	cs.Take(other, func(nc net.Conn) *visitor { return &visitor{} })
	require.Error(t, testtool.Err(late.Read(make([]byte, 1))), "it was closed")
	require.ErrorIs(t, cs.Accept(&door{answers: make(chan any)}, nil), ErrClosed)

	cs.Drop(v)
	cs.Drop(v)
	require.Zero(t, cs.Strangers())
	close(v.end)
	require.NoError(t, cs.Finish(t.Context()))
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
	require.Equal(t, 1, warned.Len())
	g.answers <- none
	require.Error(t, testtool.Err(ours.Read(make([]byte, 1))), "it had to make room")
	broken := errors.New("broken")
	g.answers <- broken
	require.ErrorIs(t, <-ended, broken)
	require.Equal(t, 2, warned.Len())
	require.True(t, g.closed.Load())
	close(v.end)
	require.NoError(t, cs.Finish(t.Context()))
}

// TestFailed: the first failures of a source have a line each, and then each reason has one.
func TestFailed(t *testing.T) {
	cs := NewConnections[*visitor](Rules{Disks: New(Config{}), Delay: -1})
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

// TestEnded: how loud the end of a connection is, when its peer comes back again and again.
func TestEnded(t *testing.T) {
	for name, c := range map[string]struct {
		how  Ending
		want []zapcore.Level
	}{
		"expected": {Expected, []zapcore.Level{zap.InfoLevel, zap.InfoLevel, zap.InfoLevel,
			zap.InfoLevel}},
		"a failure": {Failure, []zapcore.Level{zap.WarnLevel, zap.WarnLevel, zap.WarnLevel,
			zap.DebugLevel}},
		"of no use": {Useless, []zapcore.Level{zap.InfoLevel, zap.InfoLevel, zap.WarnLevel,
			zap.DebugLevel}},
	} {
		t.Run(name, func(t *testing.T) {
			cs := NewConnections[*visitor](Rules{Disks: New(Config{}), Delay: -1})
			var got []zapcore.Level
			for range c.want {
				level, _ := cs.Ended(&Conn{}, c.how, "reason", zap.InfoLevel)
				got = append(got, level)
			}
			require.Equal(t, c.want, got)
		})
	}
	require.Equal(t, Useless, EndedSince(time.Now(), false))
	require.Equal(t, Expected, EndedSince(time.Now(), true))
	require.Equal(t, Expected, EndedSince(time.Now().Add(-atOnce), false))
}

// TestAConnectionClosedWhileItIsTaken closes a connection when its socket is made but not yet in
// use, as happens when it must make room.
func TestAConnectionClosedWhileItIsTaken(t *testing.T) {
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	client := testtool.Must(net.Dial("tcp", l.Addr().String()))(t)
	defer client.Close()
	server := testtool.Must(l.Accept())(t)
	instances := func() (n int) {
		list, _ := os.ReadDir("/proc/self/fd")
		for _, fd := range list {
			what, _ := os.Readlink("/proc/self/fd/" + fd.Name())
			if what == "anon_inode:[eventpoll]" {
				n++
			}
		}
		return n
	}
	var c Conn
	c.Init(server)
	before := instances()
	cause := errors.New("it must make room")
	c.cause.Store(&cause) // Fail has begun, and has not closed it yet
	require.NoError(t, testtool.Err(c.TakeSocket(&socket.PollLimit{})))
	require.Equal(t, before, instances())
	require.NoError(t, client.SetReadDeadline(time.Now().Add(time.Minute)))
	require.ErrorIs(t, testtool.Err(client.Read(make([]byte, 1))), io.EOF)
	require.False(t, c.Fail(net.ErrClosed))
	require.Equal(t, cause, c.Cause())
}
