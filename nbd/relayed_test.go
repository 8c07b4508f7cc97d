package nbd

import (
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// relayed is a server behind a network that breaks when a test wants it.
type relayed struct {
	*served
	socket string

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	down  bool
	limit int // bytes of the server's answers until a connection breaks; 0: no limit
}

func relay(t testing.TB, v *served) *relayed {
	t.Helper()
	n := &relayed{served: v, socket: filepath.Join(t.TempDir(), "relay.sock"),
		conns: make(map[net.Conn]struct{})}
	l := testtool.Must(net.Listen("unix", n.socket))(t)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go n.carry(nc)
		}
	}()
	return n
}

func (n *relayed) carry(nc net.Conn) {
	defer nc.Close()
	n.mu.Lock()
	down, limit, to := n.down, n.limit, n.served.socket
	n.conns[nc] = struct{}{}
	n.mu.Unlock()
	if down {
		return
	}
	server, err := net.Dial("unix", to)
	if err != nil {
		return
	}
	defer server.Close()
	go func() {
		defer nc.Close()
		if limit > 0 {
			_, _ = io.CopyN(nc, server, int64(limit))
			return
		}
		_, _ = io.Copy(nc, server)
	}()
	_, _ = io.Copy(server, nc)
}

// cut breaks all connections.
func (n *relayed) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for nc := range n.conns {
		_ = nc.Close()
		delete(n.conns, nc)
	}
}

func (n *relayed) set(down bool, limit int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down, n.limit = down, limit
}

func (n *relayed) remote(t testing.TB) *Remote {
	t.Helper()
	return openRemote(t, RemoteOptions{Address: serving.SocketPrefix + n.socket,
		Export: "disk1.raw"})
}

// restart has the disk of a number served again, as after a restart of the server. Change may set
// other options; nil: they stay.
func (n *relayed) restart(t testing.TB, number uint16, change func(*serving.Options)) {
	t.Helper()
	all := n.Server.disks
	opt := all.At(number).Options
	<-testtool.Must(all.Remove(number))(t)
	if change != nil {
		change(&opt)
	}
	require.NoError(t, all.Add(opt))
}
