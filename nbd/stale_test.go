package nbd

import (
	"bytes"
	"context"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// unknown serves a disk where nobody knows the processes of clients, as QEMU's in another container
// of the pod. It returns what connects one.
func unknown(t *testing.T, v *served) (open func(mode int) *client) {
	t.Helper()
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := make(chan error, 1)
	go func() { served <- v.Serve(l, Portal{Name: serving.AddressPrefix + l.Addr().String()}) }()
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
