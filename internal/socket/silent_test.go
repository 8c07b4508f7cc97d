package socket

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// deaf has the kernel drop whatever comes for a connection, as if its machine were dead.
func deaf(t *testing.T, c *net.TCPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	require.NoError(t, err)
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}} // take 0 bytes of each packet
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: 1, Filter: &drop[0]})
	}))
	require.NoError(t, err)
}

// TestSilent tells a peer whose machine is dead from one that is only stopped, and takes nothing.
func TestSilent(t *testing.T) {
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	pair := func() (here, there *net.TCPConn) {
		c := testtool.Must(net.Dial("tcp", l.Addr().String()))(t)
		t.Cleanup(func() { _ = c.Close() })
		s := testtool.Must(l.Accept())(t)
		t.Cleanup(func() { _ = s.Close() })
		return s.(*net.TCPConn), c.(*net.TCPConn)
	}
	info := func(c *net.TCPConn) (got *unix.TCPInfo) {
		raw, err := c.SyscallConn()
		require.NoError(t, err)
		require.NoError(t, raw.Control(func(fd uintptr) {
			got, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		}))
		require.NoError(t, err)
		return got
	}
	const long = 300 * time.Millisecond
	quiet := func(c *net.TCPConn) {
		testtool.Eventually(t, func() bool {
			return time.Duration(info(c).Last_ack_recv)*time.Millisecond > 2*long
		}, "nothing has come for a while")
	}

	dead, there := pair()
	asSocket := testtool.Must(New(dead, nil))(t)
	defer asSocket.Close()
	deaf(t, there)
	quiet(dead)
	require.False(t, Silent(dead, long), "it was sent nothing")
	require.NoError(t, testtool.Err(dead.Write([]byte("are you there?"))))
	testtool.Eventually(t, func() bool { return Silent(dead, long) }, "it is silent")
	require.True(t, Silent(asSocket, long))
	require.False(t, Silent(dead, time.Hour))

	stopped, there := pair()
	require.NoError(t, there.SetReadBuffer(4096))
	require.NoError(t, stopped.SetWriteDeadline(time.Now().Add(time.Second)))
	require.Error(t, testtool.Err(stopped.Write(make([]byte, 64<<20))), "its buffers are full")
	quiet(stopped) // between two probes
	require.False(t, Silent(stopped, long))
	require.NotZero(t, info(stopped).Backoff, "it is asked for room")

	deaf(t, there)
	testtool.Eventually(t, func() bool { return Silent(stopped, long) }, "it is dead, too")
	_ = dead.Close()
	require.NoError(t, asSocket.Close())
	require.False(t, Silent(dead, 0))
	require.False(t, Silent(asSocket, 0))
	a, _ := net.Pipe()
	require.False(t, Silent(a, 0))
}
