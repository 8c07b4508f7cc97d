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
)

// TestAConnectionClosedWhileItIsTaken closes a connection when its socket is made but not yet in
// use, as happens when it must make room.
func TestAConnectionClosedWhileItIsTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	server, err := l.Accept()
	require.NoError(t, err)
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
	_, err = c.TakeSocket(&socket.PollLimit{})
	require.NoError(t, err)
	require.Equal(t, before, instances())
	require.NoError(t, client.SetReadDeadline(time.Now().Add(time.Minute)))
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	require.False(t, c.Fail(net.ErrClosed))
	require.Equal(t, cause, c.Cause())
}
