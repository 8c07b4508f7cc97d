package nbd

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// away serves a disk that loses what is not durable, and has a store, to a relay behind a network.
func away(t *testing.T, access serving.AccessMode) (*volatile, *relayed, *Remote) {
	t.Helper()
	v := &volatile{Memory: disktest.NewMemory(diskSize), durable: make([]byte, diskSize)}
	n := relay(t, serve(t, 1, func(o *serving.Options) {
		o.Disk, o.Access, o.Store = v, access, &kept{data: map[string][]byte{}}
	}))
	return v, n, n.remote(t)
}

// leave breaks the network, and waits until the server knows.
func (n *relayed) leave(t *testing.T) {
	t.Helper()
	n.set(true, 0)
	n.cut()
	testtool.Eventually(t, func() bool { return len(n.Sessions()) == 0 })
}

func block(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }

func requireContent(t *testing.T, d disk.Disk, off int64, b byte) {
	t.Helper()
	got := make([]byte, 4096)
	require.NoError(t, testtool.Err(d.ReadAt(t.Context(), got, off)))
	require.Equal(t, block(b), got)
}

func write(d disk.Disk, off int64, b byte) error {
	_, err := d.WriteAt(context.Background(), block(b), off)
	return err
}

// other writes to a disk at its server, as a client of another name, and goes.
func (n *relayed) other(t *testing.T, off int64, b byte) {
	t.Helper()
	all := n.Server.disks
	d, c := all.At(1), all.Attach("iqn.2026-01.test:other")
	defer c.Detach()
	require.True(t, c.Claim(d))
	all.KeepOwner(d)
	require.NoError(t, write(d.Disk, off, b))
	require.NoError(t, d.Disk.Flush())
}

// TestRelayUndoesNothing: others write while a relay is away. It repeats no write over theirs:
// neither if its server lost nothing, nor if it did.
func TestRelayUndoesNothing(t *testing.T) {
	for _, access := range []serving.AccessMode{serving.AccessWriteExclusive,
		serving.AccessWriteShared} {
		for _, crash := range []bool{false, true} {
			name := string(access)
			if crash {
				name += ", the server crashes"
			}
			t.Run(name, func(t *testing.T) {
				v, n, r := away(t, access)
				require.NoError(t, write(r, 4096, 1))
				n.leave(t)
				n.other(t, 4096, 2)
				if crash {
					require.NoError(t, v.crash())
					n.restart(t, 1, nil)
				}
				n.set(false, 0)
				if crash && access == serving.AccessWriteExclusive {
					err := write(r, 8192, 3)
					require.ErrorIs(t, err, disk.ErrFailed)
					require.ErrorContains(t, err, "others have used the disk since")
				} else {
					require.NoError(t, write(r, 8192, 3))
					requireContent(t, v, 8192, 3)
				}
				requireContent(t, v, 4096, 2)
			})
		}
	}
}

// TestRelayUndoesNothingLater: others wrote while a relay was away and its server ran on. When the
// server is started anew later, the relay is the last that has used the disk, and still repeats no
// write from before theirs. Once that is durable, it repeats what came afterwards.
func TestRelayUndoesNothingLater(t *testing.T) {
	for name, flush := range map[string]bool{"nothing is flushed": false, "a flush": true} {
		t.Run(name, func(t *testing.T) {
			v, n, r := away(t, serving.AccessWriteExclusive)
			require.NoError(t, write(r, 4096, 1))
			n.leave(t)
			n.other(t, 4096, 2)
			n.set(false, 0)
			require.NoError(t, write(r, 8192, 3))
			if flush {
				require.NoError(t, r.Flush())
				require.NoError(t, write(r, 8192, 4))
			}
			n.leave(t)
			require.NoError(t, v.crash())
			n.restart(t, 1, nil)
			n.set(false, 0)
			if err := write(r, 12288, 5); flush {
				require.NoError(t, err)
				requireContent(t, v, 8192, 4)
			} else {
				require.ErrorIs(t, err, disk.ErrFailed)
				require.ErrorContains(t, err, "others have used the disk since")
			}
			requireContent(t, v, 4096, 2)
		})
	}
}

// TestRelayOfASharedDisk: what was acknowledged is durable, so that nothing has to be repeated. It
// goes both ways: forwarded, and executed.
func TestRelayOfASharedDisk(t *testing.T) {
	v, n, r := away(t, serving.AccessWriteShared)
	require.True(t, r.Shared())
	c := handOn(t, r).open(t, "", structured)
	c.writeAt(0, block(1))
	require.NoError(t, write(r, 4096, 2))
	require.NoError(t, write(r, 8192, 3))
	require.NoError(t, r.Zero(t.Context(), 8192, 4096))
	require.NoError(t, testtool.Err(r.WriteAt(t.Context(), make([]byte, 2<<20), 1<<20)))
	n.leave(t)
	require.NoError(t, v.crash())
	n.restart(t, 1, nil)
	n.set(false, 0)
	requireContent(t, r, 0, 1)
	requireContent(t, r, 4096, 2)
	requireContent(t, r, 8192, 0)
	require.True(t, r.kept.empty())
}

// TestDiskBecomesShared: a relay learns at once that others may write, and goes on.
func TestDiskBecomesShared(t *testing.T) {
	v, n, r := away(t, serving.AccessWriteExclusive)
	require.False(t, r.Shared())
	require.NoError(t, write(r, 0, 1))
	require.NoError(t, n.Server.disks.SetAccess(1, serving.AccessWriteShared, false))
	testtool.Eventually(t, r.Shared)
	require.NoError(t, write(r, 4096, 2))
	require.NoError(t, r.Flush())
	require.NoError(t, v.crash())
	requireContent(t, v, 0, 1)
	requireContent(t, v, 4096, 2)
}

// TestRelayOfAProtectedDisk: a server's disk is write-protected from now on, or from its next start
// on. The relay's client gets an answer, and its next connection sees it. Reads go on, and writes
// do when they may.
func TestRelayOfAProtectedDisk(t *testing.T) {
	for name, protect := range map[string]func(*testing.T, *relayed){
		"reload": func(t *testing.T, n *relayed) {
			require.NoError(t, n.Server.disks.SetAccess(1, serving.AccessReadShared, false))
		},
		"restart": func(t *testing.T, n *relayed) {
			n.restart(t, 1, func(o *serving.Options) { o.Access = serving.AccessReadShared })
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, n, r := away(t, serving.AccessWriteExclusive)
			far := handOn(t, r)
			c := far.open(t, "", structured)
			c.writeAt(0, block(1))
			require.NoError(t, r.Flush())
			protect(t, n)
			testtool.Eventually(t, r.ReadOnly)
			a := c.do(cmdWrite, 0, 0, 4096, block(2))
			require.Equal(t, uint32(ePerm), a.code)
			require.Equal(t, "the disk is write-protected", a.text)
			require.Equal(t, uint32(ePerm), c.do(cmdWriteZeroes, 0, 0, 4096, nil).code)
			require.Zero(t, c.do(cmdFlush, 0, 0, 0, nil).code)
			require.Equal(t, block(1), c.readAt(0, 4096))
			require.ErrorIs(t, write(r, 0, 2), disk.ErrReadOnly)
			require.NotZero(t, far.open(t, "", structured).flags&flagReadOnly)
			if name == "reload" {
				require.NoError(t, n.Server.disks.SetAccess(1, serving.AccessWriteShared, false))
				testtool.Eventually(t, func() bool { return !r.ReadOnly() })
				c.writeAt(0, block(3))
			}
		})
	}
}

// TestRelayOfRevertedDisk: the content is another one when the relay is back, also after a restart
// that came between. The guest goes no further with it.
func TestRelayOfRevertedDisk(t *testing.T) {
	v, n, r := away(t, serving.AccessWriteExclusive)
	require.NoError(t, write(r, 0, 1))
	require.NoError(t, r.Flush())
	n.leave(t)
	n.restart(t, 1, nil)
	n.set(false, 0)
	require.NoError(t, write(r, 0, 2))
	n.leave(t)
	n.restart(t, 1, func(o *serving.Options) {
		require.NoError(t, serving.EndGeneration(o.Store))
		require.NoError(t, write(v, 0, 9))
	})
	n.restart(t, 1, nil)
	n.set(false, 0)
	_, err := r.ReadAt(t.Context(), make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrFailed)
	require.ErrorContains(t, err, "another content than before")
	requireContent(t, v, 0, 9)
	testtool.Eventually(t, func() bool { return len(n.Sessions()) == 0 }, "the server knows")
	requireContent(t, n.remote(t), 0, 9)
}

// TestGoAfterTheDiskHasChanged: what a client was told of a disk in the same handshake is no longer
// true when it chooses that. It does not get the disk.
func TestGoAfterTheDiskHasChanged(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, n *relayed){
		"another disk": func(t *testing.T, n *relayed) {
			n.restart(t, 1, func(o *serving.Options) { o.Identity.NAA[7] = 9 })
		},
		"another disk's content": func(t *testing.T, n *relayed) {
			n.restart(t, 1, func(o *serving.Options) {
				require.NoError(t, serving.EndGeneration(o.Store))
			})
		},
		"another client": func(t *testing.T, n *relayed) { n.other(t, 0, 5) },
		"others": func(t *testing.T, n *relayed) {
			require.NoError(t, n.Server.disks.SetAccess(1, serving.AccessWriteShared, false))
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, n, r := away(t, serving.AccessWriteExclusive)
			require.NoError(t, write(r, 0, 1))
			n.leave(t)
			c := n.hello(t)
			require.Equal(t, uint32(repAck), c.option(optStructuredReply, nil)[0].kind)
			require.Len(t, c.option(optSetMeta, metaData("disk1.raw", sessionContext+r.session)), 2)
			change(t, n)
			if strings.HasPrefix(name, "another disk") { // the former one was removed
				c.send(optionBytes(optGo, infoData("disk1.raw")))
				c.ended()
				return
			}
			last := c.option(optGo, infoData("disk1.raw"))
			require.Equal(t, uint32(repErrPolicy), last[len(last)-1].kind)
			require.Contains(t, string(last[len(last)-1].data), "that was told a moment ago")
		})
	}
}

// TestClientsThatComeAgain: clients that the server itself sends away, to come again, have not
// failed: the log does not warn of them, and nobody is slowed down.
func TestClientsThatComeAgain(t *testing.T) {
	for _, err := range []error{errChanged, errAnother, serving.ErrTakenOver} {
		reason, meant := endOf(fmt.Errorf("LUN 1: %w", err))
		require.True(t, meant, "%v: %s", err, reason)
	}
}

// barrier is reserving that counts.
type barrier struct {
	reserving
	refused atomic.Int32
}

func (b *barrier) Bars(d *serving.Disk, write bool) error {
	err := b.reserving.Bars(d, write)
	if err != nil {
		b.refused.Add(1)
	}
	return err
}

// TestRelayWaitsForAReservation: the server refuses a flush for a while, and a write and a repeated
// one. All are done when it may.
func TestRelayWaitsForAReservation(t *testing.T) {
	bars := &barrier{}
	v := &volatile{Memory: disktest.NewMemory(diskSize), durable: make([]byte, diskSize)}
	n := relay(t, serveBeside(t, serving.Config{}, bars, "", 1, func(o *serving.Options) {
		o.Disk, o.Store = v, &kept{data: map[string][]byte{}}
	}))
	r := n.remote(t)
	require.NoError(t, write(r, 0, 1))
	refused := func(do func() error) {
		t.Helper()
		bars.refused.Store(0)
		bars.reads.Store(true)
		done := testtool.Go(do)
		testtool.Eventually(t, func() bool { return bars.refused.Load() > 1 })
		require.Empty(t, done)
		bars.reads.Store(false)
		require.NoError(t, <-done)
	}
	refused(r.Flush)
	require.NoError(t, write(r, 0, 2))
	n.leave(t)
	require.NoError(t, v.crash())
	n.restart(t, 1, nil)
	refused(func() error {
		n.set(false, 0)
		requireContent(t, r, 0, 2)
		return nil
	})
	require.NoError(t, r.Flush())
	far := handOn(t, r).open(t, "", structured)
	refused(func() error {
		far.writeAt(4096, block(3))
		return nil
	})
	requireContent(t, v, 4096, 3)
}

// TestRelayPartsOfSectors: two relays of a shared disk write neighbouring bytes, and lose none.
func TestRelayPartsOfSectors(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteShared })
	const rounds = 200
	var all [2]chan struct{}
	for i := range all {
		all[i] = make(chan struct{})
		c := handOn(t, v.remote(t, "disk1.raw")).open(t, "", structured)
		go func() {
			defer close(all[i])
			for k := range uint64(rounds) {
				c.writeAt(2*k+uint64(i), []byte{byte(i + 1)})
			}
		}()
	}
	for i := range all {
		<-all[i]
	}
	got := make([]byte, 2*rounds)
	require.NoError(t, testtool.Err(v.disks[0].ReadAt(t.Context(), got, 0)))
	require.Equal(t, bytes.Repeat([]byte{1, 2}, rounds), got)
}

// TestReplayAfterADrop: a flush that comes between two batches of repeated writes is no reason to
// begin again.
func TestReplayAfterADrop(t *testing.T) {
	u := newUnflushed(maxUnflushed, func() {})
	for range 3 {
		require.NoError(t, u.reserve(t.Context(), 0))
		u.add(newCall(cmdWriteZeroes, 0, 0, 512, nil))
	}
	calls, next := u.calls(0, 1)
	require.Len(t, calls, 1)
	u.drop(2)
	calls, next = u.calls(next, 1)
	require.Len(t, calls, 1)
	u.drop(3)
	calls, _ = u.calls(next, 1)
	require.Empty(t, calls)
}

// brokenStore is a store that cannot be read while a test says so.
type brokenStore struct {
	kept
	broken atomic.Bool
	reads  atomic.Int32 // that have failed
}

func (b *brokenStore) Load(name string) ([]byte, error) {
	if b.broken.Load() && name == "content" {
		b.reads.Add(1)
		return nil, io.ErrUnexpectedEOF
	}
	return b.kept.Load(name)
}

// TestRelayOfADiskWhoseStoreFails: the server cannot say for a while which content a disk has. The
// relay waits, and goes on.
func TestRelayOfADiskWhoseStoreFails(t *testing.T) {
	store := &brokenStore{kept: kept{data: map[string][]byte{}}}
	n := relay(t, serve(t, 1, func(o *serving.Options) { o.Store = store }))
	r := n.remote(t)
	require.NoError(t, write(r, 0, 1))
	n.leave(t)
	n.restart(t, 1, nil)
	store.broken.Store(true)
	n.set(false, 0)
	testtool.Eventually(t, func() bool { return store.reads.Load() > 1 })
	_, err := OpenRemote(t.Context(), RemoteOptions{Address: serving.SocketPrefix + n.socket})
	require.ErrorContains(t, err, "which content the disk has: unexpected EOF")
	store.broken.Store(false)
	requireContent(t, r, 0, 1)
}
