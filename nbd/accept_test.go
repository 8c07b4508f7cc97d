package nbd

import (
	"context"
	"net"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/serving"
)

// failingListener fails to accept a few times, as in a process without free descriptors.
type failingListener struct {
	net.Listener
	left atomic.Int64
	err  error
}

func (l *failingListener) Accept() (net.Conn, error) {
	if l.left.Add(-1) >= 0 {
		return nil, l.err
	}
	return l.Listener.Accept()
}

// TestAcceptRecovers: without free descriptors, a client that has chosen no export gives up its
// own, and one that has chosen one goes on. An error that does not pass ends Serve.
func TestAcceptRecovers(t *testing.T) {
	v := serve(t, 1, nil)
	used, idle := v.open(t, "", structured), v.hello(t)
	inner, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	require.NoError(t, err)
	l := &failingListener{Listener: inner, err: &net.OpError{Op: "accept", Err: syscall.EMFILE}}
	l.left.Store(3)
	served := make(chan error, 1)
	go func() { served <- v.Serve(l, Portal{Name: "unix:/s"}) }()
	t.Cleanup(func() {
		require.NoError(t, v.Shutdown(context.Background()))
		require.ErrorIs(t, <-served, ErrServerClosed)
	})
	idle.ended()
	nc, err := net.Dial("unix", inner.Addr().String())
	require.NoError(t, err)
	greet(t, nc)
	used.writeAt(0, []byte("hello"))

	inner, err = net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	require.NoError(t, err)
	broken := &failingListener{Listener: inner,
		err: &net.OpError{Op: "accept", Err: syscall.EINVAL}}
	broken.left.Store(1)
	require.ErrorIs(t, v.Serve(broken, Portal{Name: "unix:/s"}), syscall.EINVAL)
}

// TestSessionHasTheNameOfItsSocket: a daemon may bind a socket by another name than people know.
func TestSessionHasTheNameOfItsSocket(t *testing.T) {
	v := serve(t, 1, nil)
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	require.NoError(t, err)
	go func() { _ = v.Serve(l, Portal{Name: serving.SocketPrefix + "/run/disk/vm.sock"}) }()
	nc, err := net.Dial("unix", l.Addr().String())
	require.NoError(t, err)
	c := greet(t, nc)
	c.send(u32(flagFixedNewstyle | flagNoZeroes))
	c.choose("", compact)
	require.Equal(t, "/run/disk/vm.sock", v.Sessions()[0].Local)
}
