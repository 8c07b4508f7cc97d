package socket

import (
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestLocalUser: the kernel says who has connected.
func TestLocalUser(t *testing.T) {
	l := testtool.Must(net.Listen("tcp4", "127.107.0.1:0"))(t)
	defer l.Close()
	c := testtool.Must(net.Dial("tcp4", l.Addr().String()))(t)
	defer c.Close()
	from := testtool.Must(l.Accept())(t)
	defer from.Close()
	uid := testtool.Must(LocalUser(from))(t)
	require.EqualValues(t, os.Geteuid(), uid)

	require.NoError(t, c.(*net.TCPConn).CloseWrite())
	require.Error(t, testtool.Err(from.Read(make([]byte, 1))))
	require.Error(t, testtool.Err(LocalUser(from)), "it is about to go")
}

// TestLocalUserOfAnother is a client of another user, and one from elsewhere.
func TestLocalUserOfAnother(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root")
	}
	l := testtool.Must(net.Listen("tcp4", "127.107.0.1:0"))(t)
	defer l.Close()
	host, port, _ := net.SplitHostPort(l.Addr().String())
	other := exec.Command("bash", "-c", "exec 3<>/dev/tcp/"+host+"/"+port+" && read -u 3")
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 107, Gid: 107}}
	require.NoError(t, other.Start())
	from := testtool.Must(l.Accept())(t)
	require.EqualValues(t, 107, testtool.Must(LocalUser(from))(t))
	require.NoError(t, from.Close())
	_ = other.Wait()
}

// TestLocalUserElsewhere is about what has no entry in the table.
func TestLocalUserElsewhere(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	require.Error(t, testtool.Err(LocalUser(a)))

	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6")
	}
	defer l.Close()
	c := testtool.Must(net.Dial("tcp6", l.Addr().String()))(t)
	defer c.Close()
	_, err = LocalUser(c)
	require.ErrorContains(t, err, "IPv4")
	require.False(t, strings.Contains(err.Error(), "%!"))
}
