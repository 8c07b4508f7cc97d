package nbd

import (
	"bytes"
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// unknown serves a disk where nobody knows the processes of clients, as QEMU's in another container
// of the pod. It returns what connects one.
func unknown(t *testing.T, v *served) (open func(mode int) *client) {
	t.Helper()
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := testtool.Go(func() error {
		return v.Serve(l, Portal{Name: serving.AddressPrefix + l.Addr().String()})
	})
	t.Cleanup(func() {
		require.NoError(t, v.Shutdown(context.Background()))
		require.ErrorIs(t, <-served, ErrServerClosed)
	})
	return func(mode int) *client {
		t.Helper()
		c := greet(t, testtool.Must(net.Dial("tcp", l.Addr().String()))(t))
		c.send(u32(flagFixedNewstyle | flagNoZeroes))
		if mode == compact {
			c.choose("", mode)
		} else {
			c.choose("", mode, "base:allocation")
		}
		return c
	}
}

// TestUnknownProcessReconnects: a process that nobody knows has one connection. If it loses it, and
// makes another one, that one is not refused because nobody has noticed yet.
func TestUnknownProcessReconnects(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteExclusive })
	open := unknown(t, v)
	first := open(structured)
	for i := range 200 {
		first.writeAt(0, []byte("first"))
		second := open(structured)
		if i%50 == 0 {
			require.Equal(t, uint32(ePerm), second.do(cmdWrite, 0, 0, 5, []byte("other")).code)
		}
		require.NoError(t, first.Close())
		second.writeAt(0, []byte("again"))
		first = second
	}
}

// TestNothingComesLate: a write that hangs when its client loses the connection is done before
// those of the next one.
func TestNothingComesLate(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteExclusive })
	open := unknown(t, v)
	gate := make(chan struct{})
	opened := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(opened) // or the server's end would wait for it
	defer v.disks[0].Inject(disktest.Rule{Off: 1 << 20, Length: 4096, Block: gate})()
	old, after := bytes.Repeat([]byte{1}, 4096), bytes.Repeat([]byte{2}, 4096)
	first := open(structured)
	first.send(first.request(cmdWrite, 0, 1<<20, 4096, old))
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpWrite) > 0 },
		"the write hangs")
	for range 2 { // they wait for it, or are not read yet
		first.send(first.request(cmdWrite, 0, 1<<20, 4096, old))
	}
	require.NoError(t, first.Close())
	second := open(structured)
	second.writeAt(8192, []byte("again"))
	second.send(second.request(cmdWrite, 0, 1<<20, 4096, after))
	opened()
	_, written := second.answer(func(uint64) (uint16, uint64) { return cmdWrite, 0 })
	second.good(written)
	require.Equal(t, after, second.readAt(1<<20, 4096))
}

// TestRelayComesBackAtOnce: a relay that has closed its disk is no reason to refuse the next one of
// its name, although nobody has noticed that yet. One that is there is.
func TestRelayComesBackAtOnce(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteExclusive })
	for range 100 {
		r := v.remote(t, "")
		require.NoError(t, testtool.Err(r.WriteAt(t.Context(), []byte("relay"), 0)))
		require.NoError(t, r.Close())
	}
	stays, other := v.remote(t, ""), v.remote(t, "")
	require.NoError(t, testtool.Err(stays.WriteAt(t.Context(), []byte("stays"), 0)))
	_, err := other.WriteAt(t.Context(), []byte("other"), 0)
	require.ErrorContains(t, err, "in use by another client that is called")
	require.NoError(t, testtool.Err(stays.WriteAt(t.Context(), []byte("stays"), 0)))
}

// TestDeadMachine: a client whose machine dies while a reply is under way loses its disk, to a
// client that could not have it before.
func TestDeadMachine(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteExclusive })
	dead := unknown(t, v)(structured)
	dead.writeAt(0, []byte("mine"))
	other := v.open(t, "", structured)
	require.Equal(t, uint32(ePerm), other.do(cmdRead, 0, 0, 512, nil).code)
	gate := make(chan struct{})
	opened := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(opened)
	defer v.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Block: gate})()
	calls := v.disks[0].Calls(disktest.OpRead)
	dead.send(dead.request(cmdRead, 0, 0, 4096, nil))
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpRead) > calls },
		"its read is under way")
	raw, err := dead.Conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}} // what comes is not taken
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: 1, Filter: &drop[0]})
	}))
	require.NoError(t, err)
	opened()
	v.conns.LookNow(time.Now())
	require.Len(t, v.Sessions(), 2, "it is too early")
	testtool.Eventually(t, func() bool {
		for _, c := range v.conns.All(func(c *conn) bool { return c.Silent(time.Second) }) {
			c.fail(serving.ErrSilent)
		}
		return len(v.Sessions()) == 1
	}, "its connection ends")
	other.writeAt(0, []byte("now mine"))
}
