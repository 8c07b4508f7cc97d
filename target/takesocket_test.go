package target

import (
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/internal/testtool"
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
	defer server.Close()
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
	srv := &Server{pool: noMemory(), log: zap.NewNop()}
	c := srv.newConn(server)
	before := instances()
	taken := make(chan struct{})
	c.netMu.Lock()
	go func() {
		defer close(taken)
		c.takeSocket()
	}()
	testtool.Eventually(t, func() bool { return instances() == before+2 })
	c.closeOnce.Do(func() { // like closeNetwork, with the lock
		close(c.gone)
		_ = c.nc.Close()
	})
	c.netMu.Unlock()
	<-taken
	require.Equal(t, before, instances())
	require.NoError(t, client.SetReadDeadline(time.Now().Add(time.Minute)))
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}
