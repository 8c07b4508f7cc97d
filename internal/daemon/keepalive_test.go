package daemon

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/testtool"
)

// TestListenersNoticeDeadMachines: whatever the daemon serves at an address, the kernel asks silent
// clients for a sign of life, and gives them up after 45 s.
func TestListenersNoticeDeadMachines(t *testing.T) {
	a := options.Address{Addr: netip.MustParseAddr("127.0.0.1")}
	l, err := listen(t.Context(), "portal", a, []options.Address{a}, options.Alternatives{{}})
	require.NoError(t, err)
	defer l.Close()
	c := testtool.Must(net.Dial("tcp", l.Addr().String()))(t)
	defer c.Close()
	accepted := testtool.Must(l.Accept())(t)
	defer accepted.Close()
	raw, err := accepted.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	get := func(level, option int) (n int) {
		require.NoError(t, raw.Control(func(fd uintptr) {
			n, err = unix.GetsockoptInt(int(fd), level, option)
		}))
		require.NoError(t, err)
		return n
	}
	require.Equal(t, 1, get(unix.SOL_SOCKET, unix.SO_KEEPALIVE))
	require.Equal(t, 45, get(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE)+
		get(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL)*get(unix.IPPROTO_TCP, unix.TCP_KEEPCNT))
}
