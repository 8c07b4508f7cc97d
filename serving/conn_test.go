package serving

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
)

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
