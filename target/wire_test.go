package target

import (
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestAConnectionWithinTheHostIsNotPaced(t *testing.T) {
	allowed, err := os.ReadFile("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
	require.NoError(t, err)
	others := slices.DeleteFunc(strings.Fields(string(allowed)), func(name string) bool { return name == "reno" })
	if len(others) == 0 {
		t.Skip("this kernel lets a process choose no other congestion control than reno")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	server, err := l.Accept()
	require.NoError(t, err)
	defer server.Close()

	raw, err := server.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, others[0])
	}))
	require.NoError(t, err)
	var w wire
	w.init(server)
	var name string
	require.NoError(t, raw.Control(func(fd uintptr) { name, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION) }))
	require.NoError(t, err)
	require.Equal(t, "reno", name)
}

func TestWithinHost(t *testing.T) {
	tcp := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 3260} }
	for _, c := range []struct {
		local, remote net.Addr
		within        bool
	}{
		{tcp("127.0.0.1"), tcp("127.0.0.1"), true},
		{tcp("127.0.0.7"), tcp("127.0.0.1"), true},
		{tcp("::1"), tcp("::1"), true},
		{tcp("10.1.2.3"), tcp("10.1.2.3"), true},
		{tcp("10.1.2.3"), tcp("::ffff:10.1.2.3"), true},
		{tcp("10.1.2.3"), tcp("10.1.2.4"), false},
		{tcp("fd00::1"), tcp("fd00::2"), false},
		{&net.UnixAddr{}, &net.UnixAddr{}, false},
		{tcp("127.0.0.1"), nil, false},
	} {
		require.Equal(t, c.within, withinHost(c.local, c.remote), "%v to %v", c.local, c.remote)
	}
}
