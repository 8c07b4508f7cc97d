package target_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/target"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// counts is an Observer that counts.
type counts struct {
	accepted, refused, ended, commands, rejected, panics atomic.Int64

	mu      sync.Mutex
	reasons []string // why sessions ended, guarded by mu
}

func (c *counts) LoginAccepted(target.LoginEvent) { c.accepted.Add(1) }
func (c *counts) LoginRefused(target.LoginEvent)  { c.refused.Add(1) }
func (c *counts) CommandDone(target.CommandEvent) { c.commands.Add(1) }
func (c *counts) PDURejected(string)              { c.rejected.Add(1) }
func (c *counts) PanicCaught()                    { c.panics.Add(1) }

func (c *counts) SessionEnded(e target.SessionEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reasons = append(c.reasons, e.Reason)
	c.ended.Add(1) // last, so that a reader that has seen it also sees the reason
}

func (c *counts) ends() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.reasons...)
}

// server is a running target with two faulty disks in memory, LUN 1 and LUN 2.
type server struct {
	*target.Server
	addr  net.Addr
	disks [2]*disktest.Fault
	seen  *counts

	bugs int64 // panics that the test causes; any other one fails it
}

const diskSize = 64 << 20

func identity(n byte) disk.Identity {
	return disk.Identity{Serial: "test" + string('0'+n), NAA: [8]byte{0x30, 0, 0, 0, 0, 0, 0, n}}
}

func newServer(t *testing.T, change ...func(*target.Options)) *server {
	s := &server{seen: new(counts)}
	opt := target.Options{Observer: s.seen}
	for i := range s.disks {
		s.disks[i] = disktest.NewFault(disktest.NewMemory(diskSize))
		opt.LUNs = append(opt.LUNs,
			target.LUN{Number: uint16(i + 1), Name: "test", Disk: s.disks[i],
				Identity: identity(byte(i + 1)), Access: target.AccessWriteShared})
	}
	for _, f := range change {
		f(&opt)
	}
	srv, err := target.New(opt)
	require.NoError(t, err)
	s.Server = srv
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.addr = l.Addr()
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	t.Cleanup(func() {
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, target.ErrServerClosed)
		require.Equal(t, s.bugs, s.seen.panics.Load(), "panics caught")
		require.Zero(t, srv.Working(), "no reader is left")
	})
	return s
}

// eventually waits for a condition that does not depend on speed.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 3000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("never happened: %s", what)
}

func TestOptions(t *testing.T) {
	lun := func(n uint16) target.LUN {
		return target.LUN{Number: n, Name: "a.raw", Disk: disktest.NewMemory(1 << 20),
			Identity: identity(1)}
	}
	for _, c := range []struct {
		name, want string
		opt        target.Options
	}{
		{"no LUN", "at least one LUN", target.Options{}},
		{"LUN 0", "LUN 0 (a.raw): a LUN number is 1 to 16383",
			target.Options{LUNs: []target.LUN{lun(0)}}},
		{"LUN 16384", "a LUN number is 1 to 16383", target.Options{LUNs: []target.LUN{lun(16384)}}},
		{"LUN twice", "given to both", target.Options{LUNs: []target.LUN{lun(1), lun(1)}}},
		{"no disk", "has no disk", target.Options{LUNs: []target.LUN{{Number: 1}}}},
		{"long vendor", "vendor", target.Options{LUNs: []target.LUN{lun(1)}, Vendor: "123456789"}},
		{"sessions without a handle", "handles for 65535 sessions",
			target.Options{LUNs: []target.LUN{lun(1)},
				Limits: target.Limits{MaxConnections: 65536}}},
		{"negative limit", "CommandWindow",
			target.Options{LUNs: []target.LUN{lun(1)}, Limits: target.Limits{CommandWindow: -1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := target.New(c.opt)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// TestCloseAsServingBegins closes a server just as it begins to serve. The race detector finds
// faults.
func TestCloseAsServingBegins(t *testing.T) {
	for range 300 {
		srv, err := target.New(
			target.Options{LUNs: []target.LUN{{Number: 1, Name: "test",
				Disk: disktest.NewMemory(diskSize), Identity: identity(1),
				Access: target.AccessWriteShared}}})
		require.NoError(t, err)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		served := make(chan error, 1)
		go func() { served <- srv.Serve(l) }()
		runtime.Gosched()
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, target.ErrServerClosed)
	}
}

func TestServeAfterClose(t *testing.T) {
	s := newServer(t)
	require.NoError(t, s.Shutdown(context.Background()))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.ErrorIs(t, s.Serve(l), target.ErrServerClosed)
	_, err = l.Accept()
	require.True(t, errors.Is(err, net.ErrClosed), "Serve closes its listener")
}
