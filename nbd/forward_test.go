package nbd

import (
	"bytes"
	"context"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// handOn serves the disk of a server to others, as a relay does.
func handOn(t testing.TB, r *Remote) *served {
	t.Helper()
	return serve(t, 1, func(o *serving.Options) { o.Disk = r })
}

// TestRelayHeals: the network between a relay and its server breaks in the middle of requests and
// replies, and no client sees it.
func TestRelayHeals(t *testing.T) {
	n := relay(t, serve(t, 1, nil))
	heals(t, n, handOn(t, n.remote(t)).remote(t, "disk1.raw"))
}

// TestRelayOfASlowClient: a client that does not take its replies holds up no other one.
func TestRelayOfASlowClient(t *testing.T) {
	far := handOn(t, fullServer(t).remote(t, "disk1.raw"))
	const size, requests = 256 << 10, 64
	slow, other := far.open(t, "", structured), far.open(t, "", structured)
	var all []byte
	for i := range uint64(requests) {
		all = append(all, slow.request(cmdRead, 0, i*size%diskSize, size, nil)...)
	}
	sent := testtool.Go(func() error { return testtool.Err(slow.Write(all)) })
	for range 100 {
		other.readAt(0, 4096)
		time.Sleep(time.Millisecond)
	}
	for range requests {
		require.NoError(t, testtool.Err(io.CopyN(io.Discard, slow.in, 20+8+size)))
	}
	require.NoError(t, <-sent)
	slow.readAt(0, 4096)
}

// TestRelayGivesUp: the server of a relay hangs. A client that has gone away with a read under way
// keeps nothing: neither memory nor the end of the relay.
func TestRelayGivesUp(t *testing.T) {
	v := serve(t, 1, nil)
	hang := make(chan struct{})
	v.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Block: hang})
	far := handOn(t, v.remote(t, "disk1.raw"))
	c := far.open(t, "", structured)
	require.NoError(t, testtool.Err(c.Write(c.request(cmdRead, 0, 0, 4096, nil))))
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpRead) == 1 })
	require.NoError(t, c.Close())
	testtool.Eventually(t, func() bool { return len(far.Sessions()) == 0 })
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	require.NoError(t, far.Shutdown(ctx))
	close(hang)
}

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

// TestRelaySendsWhatIsQueued: what a relay's reader has queued for the server is sent, however the
// reader leaves. The next connection finds the range free, and what came before its end written.
func TestRelaySendsWhatIsQueued(t *testing.T) {
	for name, last := range map[string]func(c *client) []byte{
		"disconnects":   func(c *client) []byte { return c.request(cmdDisconnect, 0, 0, 0, nil) },
		"sends rubbish": func(*client) []byte { return make([]byte, requestLen) },
		"announces too much": func(c *client) []byte {
			return c.request(cmdWrite, 0, 0, 1<<40, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := serve(t, 1, nil)
			far := handOn(t, v.remote(t, "disk1.raw"))
			mode := structured
			if name == "announces too much" {
				mode = extended
			}
			c := far.open(t, "", mode)
			data := bytes.Repeat([]byte{7}, 4096)
			_, err := c.Write(append(c.request(cmdWrite, 0, 4096, 4096, data), last(c)...))
			require.NoError(t, err)
			testtool.Eventually(t, func() bool { return len(far.Sessions()) == 0 })
			next := far.open(t, "", structured)
			next.writeAt(4096, bytes.Repeat([]byte{8}, 512))
			require.Equal(t, append(bytes.Repeat([]byte{8}, 512), data[512:]...),
				next.readAt(4096, 4096))
		})
	}
}

// slowFront lets one request wait before it begins.
type slowFront struct {
	reserving
	next atomic.Pointer[chan struct{}] // the request waits for it
}

func (f *slowFront) Bars(*serving.Disk, bool) error {
	if wait := f.next.Swap(nil); wait != nil {
		<-*wait
	}
	return nil
}

// TestRelaySendsForAFormerReader: a request waits so long before it is queued that another
// goroutine reads from the client by then. It is sent all the same.
func TestRelaySendsForAFormerReader(t *testing.T) {
	front, begins := &slowFront{}, make(chan struct{})
	r := serve(t, 1, nil).remote(t, "disk1.raw")
	c := serveBeside(t, serving.Config{}, front, "", 1, func(o *serving.Options) {
		o.Disk = r
	}).open(t, "", structured)
	front.next.Store(&begins)
	c.send(c.request(cmdRead, 0, 0, 4096, nil))
	require.Equal(t, make([]byte, 4096), c.readAt(4096, 4096))
	close(begins)
	_, a := c.answer(func(uint64) (uint16, uint64) { return cmdRead, 4096 })
	c.good(a)
}

// TestRelayWaitsForNothingOfItsOwn: a request that is not forwarded, and overlaps a queued one, is
// answered.
func TestRelayWaitsForNothingOfItsOwn(t *testing.T) {
	far := handOn(t, serve(t, 1, nil).remote(t, "disk1.raw"))
	all := far.Server.disks.Memory
	for name, second := range map[string]struct {
		command uint16
		length  int
		scarce  bool
	}{
		"a write while memory is scarce": {cmdWrite, 64 << 10, true},
		"a write of a part of a sector":  {cmdWrite, 100, false},
		"a long write":                   {cmdWrite, 2 << 20, false},
		"zeroes":                         {cmdWriteZeroes, 64 << 10, false},
		"a trim":                         {cmdTrim, 64 << 10, false},
		"a flush":                        {cmdFlush, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := far.open(t, "", structured)
			if second.scarce {
				const taken = 48 << 20 // of 64 MiB
				for range taken / memory.Max {
					b := all.Get(memory.Max)
					require.NotNil(t, b)
					defer b.Release()
				}
			}
			var data []byte
			if second.command == cmdWrite {
				data = bytes.Repeat([]byte{2}, second.length)
			}
			_, err := c.Write(append(c.request(cmdWrite, 0, 0, 4096, make([]byte, 4096)),
				c.request(second.command, 0, 0, uint64(second.length), data)...))
			require.NoError(t, err)
			for range 2 {
				_, a := c.answer(func(uint64) (uint16, uint64) { return second.command, 0 })
				c.good(a)
			}
		})
	}
}
