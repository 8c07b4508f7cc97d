package nbd

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	testtool.Eventually(t, done, what)
}

// serveFar serves a disk whose content is far away, over a network that is cut. The first 4 KiB are
// at hand.
func serveFar(t *testing.T) (*served, *disktest.Distant) {
	t.Helper()
	far := disktest.NewDistant(disktest.NewMemory(diskSize))
	require.NoError(t, testtool.Err(far.WriteAt(t.Context(), bytes.Repeat([]byte{9}, 4096), 0)))
	far.Cut()
	return serve(t, 1, func(o *serving.Options) { o.Disk = far }), far
}

// waits requires that so many requests wait for far content.
func (v *served) waits(t testing.TB, n int) {
	t.Helper()
	eventually(t, "requests wait", func() bool {
		held := 0
		for _, c := range v.conns.All(func(*conn) bool { return true }) {
			c.mu.Lock()
			for run := range c.held {
				if run.r.Waiting() {
					held++
				}
			}
			c.mu.Unlock()
		}
		return held == n
	})
}

// TestFarContent: requests wait for it, and others on the same connection go on.
func TestFarContent(t *testing.T) {
	v, far := serveFar(t)
	inModes(t, func(t *testing.T, mode int) {
		far.Forget()
		far.Restore()
		c := v.open(t, "", mode)
		c.writeAt(0, bytes.Repeat([]byte{9}, 4096))
		far.Cut()
		c.send(c.request(cmdRead, 0, 1<<20, 4096, nil),
			c.request(cmdWrite, 0, 2<<20, 3, []byte("abc")))
		v.waits(t, 2)
		v.waitsFor(t, status.TroubleRegistry, 2)
		require.Equal(t, bytes.Repeat([]byte{9}, 512), c.readAt(0, 512))
		c.alive()
		far.Restore()
		for range 2 {
			_, a := c.answer(func(cookie uint64) (uint16, uint64) {
				if cookie == 2 {
					return cmdRead, 4096
				}
				return cmdWrite, 3
			})
			c.good(a)
		}
		require.Equal(t, []byte("abc"), c.readAt(2<<20, 3))
	})
}

// TestFarExtents: what is allocated, and where, may have to be asked for far away.
func TestFarExtents(t *testing.T) {
	v, far := serveFar(t)
	for _, name := range []string{"base:allocation", "qemu:allocation-depth"} {
		far.Forget()
		far.Cut()
		c := v.openWith(t, "", extended, name)
		c.send(c.request(cmdBlockStatus, 0, 1<<20, 4096, nil))
		v.waits(t, 1)
		c.alive()
		far.Restore()
		_, a := c.answer(nil)
		c.good(a)
		require.Len(t, a.status, 1)
	}
}

// TestLongWriteToFarContent: the rest of a write that waits is not taken for the next request.
func TestLongWriteToFarContent(t *testing.T) {
	v, far := serveFar(t)
	c := v.open(t, "", structured)
	data := bytes.Repeat([]byte("0123456789"), 300<<10)
	go func() {
		_, _ = c.Write(c.request(cmdWrite, 0, 1<<20+7, uint64(len(data)), data))
	}()
	v.waits(t, 1)
	far.Restore()
	_, a := c.answer(func(uint64) (uint16, uint64) { return cmdWrite, 0 })
	c.good(a)
	require.True(t, bytes.Equal(data, c.readAt(1<<20+7, uint64(len(data)))))
}

// TestEndsWhileContentIsFar: each end of a wait leaves nothing behind.
func TestEndsWhileContentIsFar(t *testing.T) {
	start := func(t *testing.T) (*served, *client) {
		v, _ := serveFar(t)
		c := v.open(t, "", structured)
		c.send(c.request(cmdRead, 0, 1<<20, 1<<20, nil), c.request(cmdRead, 0, 4<<20, 512, nil),
			c.request(cmdWrite, 0, 3<<20+1, 3, []byte("abc")))
		v.waits(t, 3)
		return v, c
	}
	idle := func(t *testing.T, v *served) {
		t.Helper()
		eventually(t, "memory is free", func() bool { return v.Server.disks.Memory.Used() == 0 })
	}
	t.Run("client", func(t *testing.T) {
		v, c := start(t)
		require.NoError(t, c.Close())
		idle(t, v)
	})
	t.Run("kick", func(t *testing.T) {
		v, c := start(t)
		require.Len(t, v.EndSessions(func(status.Session) bool { return true }), 1)
		c.ended()
		idle(t, v)
	})
	t.Run("removal", func(t *testing.T) {
		v, c := start(t)
		<-testtool.Must(v.Server.disks.Remove(1))(t)
		c.ended()
		idle(t, v)
	})
	t.Run("handover", func(t *testing.T) {
		v, c := start(t)
		all := v.Server.disks
		heir := all.Attach("iqn.2026-01.test:heir")
		require.NoError(t, all.Admit(1, heir.Name(), time.Time{}))
		former := testtool.Must(all.HandOver(1))(t)
		require.Equal(t, serving.SocketPrefix+v.socket, former)
		for range 3 {
			_, a := c.answer(func(uint64) (uint16, uint64) { return 0, 0 })
			require.Equal(t, uint32(ePerm), a.code, a.text)
		}
		require.Equal(t, uint32(ePerm), c.do(cmdRead, 0, 0, 512, nil).code)
		require.NoError(t, all.Admit(1, former, time.Time{}))
		require.Equal(t, byte(9), c.readAt(0, 512)[0], "handed back")
	})
	t.Run("shutdown", func(t *testing.T) {
		v, c := start(t)
		require.NoError(t, v.Shutdown(t.Context()))
		c.ended()
		idle(t, v)
	})
}

// TestHangingDisk: a request that hangs holds up no other, and a client that leaves it leaves
// nothing once the disk answers.
func TestHangingDisk(t *testing.T) {
	v := serve(t, 1, nil)
	gate := make(chan struct{})
	defer v.disks[0].Inject(disktest.Rule{Off: 1 << 20, Length: 4096, Block: gate})()
	c := v.open(t, "", structured)
	for range 20 {
		c.send(c.request(cmdRead, 0, 1<<20, 512, nil), c.request(cmdWrite, 0, 1<<20+512, 512,
			make([]byte, 512)), c.request(cmdTrim, 0, 1<<20+1024, 512, nil))
	}
	require.Len(t, c.readAt(0, 4096), 4096)
	c.alive()
	require.NoError(t, c.Close())
	other := v.open(t, "", structured)
	other.readAt(0, 4096)
	close(gate)
	other.readAt(1<<20, 512)
}

// panicky panics in each call that changes or reads the second MiB.
type panicky struct{ *disktest.Memory }

func (p panicky) trap(off int64) {
	if off >= 1<<20 {
		panic("a bug in the disk")
	}
}

func (p panicky) ReadAt(ctx context.Context, b []byte, off int64) (int, error) {
	p.trap(off)
	return p.Memory.ReadAt(context.Background(), b, off)
}

func (p panicky) WriteAt(ctx context.Context, b []byte, off int64) (int, error) {
	p.trap(off)
	return p.Memory.WriteAt(context.Background(), b, off)
}

func (p panicky) Zero(ctx context.Context, off, length int64) error {
	p.trap(off)
	return p.Memory.Zero(context.Background(), off, length)
}

func (p panicky) Discard(ctx context.Context, off, length int64) error {
	p.trap(off)
	return p.Memory.Discard(context.Background(), off, length)
}

// TestPanics: a panic ends its connection, and keeps neither memory nor ranges nor the disk.
func TestPanics(t *testing.T) {
	full := disktest.NewMemory(diskSize)
	require.NoError(t, testtool.Err(full.WriteAt(t.Context(), make([]byte, diskSize), 0)))
	v := serve(t, 1, func(o *serving.Options) { o.Disk = panicky{full} })
	other := v.open(t, "", structured)
	inModes(t, func(t *testing.T, mode int) {
		for _, command := range []uint16{cmdRead, cmdWrite, cmdTrim, cmdWriteZeroes, cmdCache} {
			for _, r := range [][2]uint64{{1 << 20, 4096}, {1<<20 + 1, 2}, {1 << 20, 3 << 20},
				{1<<20 - 1, 1 << 20}} {
				if command == cmdTrim && r[1] == 2 {
					continue // nothing to do
				}
				c := v.open(t, "", mode)
				var p []byte
				if command == cmdWrite {
					p = make([]byte, r[1])
				}
				go func() { _, _ = c.Write(c.request(command, 0, r[0], r[1], p)) }()
				buffer := make([]byte, 1<<20)
				for err := error(nil); err == nil; _, err = c.in.Read(buffer) {
				}
				_ = c.Close()
				other.alive()
			}
		}
	})
	require.False(t, v.Server.disks.At(1).Ranges.Writing(serving.SocketPrefix+v.socket))
	<-testtool.Must(v.Server.disks.Remove(1))(t)
}

// manyStrangers is how many clients may have chosen no export.
const manyStrangers = 256

// TestHalfOpen: clients that say nothing, or stop within a message, keep nobody out.
func TestHalfOpen(t *testing.T) {
	v := serve(t, 1, nil)
	c := v.open(t, "", structured)
	var idle []*client
	for i := range 1000 {
		h := v.dial(t)
		h.send(join(u32(3), optionBytes(optGo, infoData("")))[:i%26])
		idle = append(idle, h)
	}
	require.LessOrEqual(t, v.conns.Strangers(), manyStrangers)
	c.alive()
	v.open(t, "", compact).alive()
	for _, h := range idle {
		_ = h.Close()
	}
	// within each part of a request
	write := c.request(cmdWrite, 0, 0, 300<<10, make([]byte, 300<<10))
	for _, n := range []int{1, 27, 28, 29, 5000, 200 << 10} {
		h := v.open(t, "", structured)
		h.send(write[:n])
		defer h.Close()
	}
	c.alive()
}

// TestScarceMemory: clients that announce more than there is memory for, and clients that read
// nothing, are no reason for an error at another one.
func TestScarceMemory(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteShared })
	all := v.Server.disks
	other := unknown(t, v) // another client than those at the socket
	c := other(structured)
	data := bytes.Repeat([]byte{5}, 2<<20)
	c.writeAt(0, data)
	for range 80 { // 80 MiB are announced, and nothing is taken for them
		h := v.open(t, "", compact)
		h.send(h.request(cmdWrite, 0, 0, 1<<20, nil))
	}
	require.Less(t, all.Memory.Used(), int64(32<<20))
	for range 80 {
		h := v.open(t, "", compact)
		h.send(h.request(cmdWrite, 0, 0, 1<<20, []byte{1}))
	}
	require.Less(t, all.Memory.Used(), int64(64<<20))
	all.Memory.Charge(64 << 20)
	defer all.Memory.Charge(-64 << 20)
	require.True(t, bytes.Equal(data, c.readAt(0, 2<<20)))
	c.writeAt(1, data)
	c.writeAt(0, data[:4096])
	own := v.open(t, "", structured)
	require.True(t, bytes.Equal(data, own.readAt(0, 2<<20)), "of the client that has the memory")
	compactly := other(compact)
	require.Len(t, compactly.readAt(0, chunk), chunk)
	require.Equal(t, uint32(eNoMem), compactly.do(cmdRead, 0, 0, diskSize, nil).code)
	compactly.alive()
}

// TestClientsThatStandStill: while memory is scarce, a client that takes no replies and one that
// stops within a request lose their connections. Others keep theirs.
func TestClientsThatStandStill(t *testing.T) {
	v := serve(t, 1, nil)
	used := v.Server.disks.Memory.Used
	idle := v.open(t, "", structured)
	idle.alive()
	eventually(t, "the server has noted that its reply is out", func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return len(v.allLocked(func(c *conn) bool { return c.tx.WriteSince.Load() != 0 })) == 0
	})
	before := used()
	deaf := v.open(t, "", structured)
	deaf.send(deaf.request(cmdRead, cmdFlagDF, 0, 8<<20, nil))
	half := v.open(t, "", structured)
	half.send(half.request(cmdWrite, 0, 0, 1<<20, nil), []byte("x"))
	eventually(t, "they hold memory", func() bool { return used() >= before+9<<20 })
	look := func(at time.Time) {
		for _, c := range v.conns.All(func(*conn) bool { return true }) {
			c.Look(at, true)
		}
	}
	look(time.Now())
	require.GreaterOrEqual(t, used(), before+9<<20, "it is too early")
	eventually(t, "it is free", func() bool {
		look(time.Now().Add(2 * stillTimeout)) // again: it may not have begun to write yet
		return used() == before
	})
	half.ended()
	idle.alive()
}

// waitsFor requires that people are told of so many requests that wait.
func (v *served) waitsFor(t *testing.T, kind string, count int64) {
	t.Helper()
	look := func() []status.Trouble {
		return v.Server.disks.At(1).Troubles(time.Now().Add(serving.LongWait))
	}
	testtool.Eventually(t, func() bool {
		all := look()
		return len(all) == 1 && all[0].Kind == kind && all[0].Count == count &&
			slices.Equal(all[0].Peers, []string{serving.SocketPrefix + v.socket})
	}, "it is trouble: %v", func() any { return look() })
	waiting := 0
	for _, one := range v.Sessions() {
		waiting += one.Waiting
	}
	require.EqualValues(t, count, waiting)
}

// TestHangingDiskIsTrouble: people see how many requests wait for storage, and whose they are, also
// those that a relay forwards to a server with such a disk, for which nobody waits here.
func TestHangingDiskIsTrouble(t *testing.T) {
	for kind, relayed := range map[string]bool{
		status.TroubleStorage: false, status.TroubleServer: true,
	} {
		v := serve(t, 1, nil)
		fault := v.disks[0]
		if relayed {
			v = handOn(t, v.remote(t, "disk1.raw"))
		}
		block := make(chan struct{})
		remove := fault.Inject(disktest.Rule{Op: disktest.OpAny, Block: block})
		c := v.open(t, "disk1.raw", structured)
		c.send(c.request(cmdRead, 0, 0, 4096, nil), c.request(cmdRead, 0, 4096, 4096, nil))
		v.waitsFor(t, kind, 2)
		remove()
		close(block)
		for range 2 {
			c.answer(func(uint64) (uint16, uint64) { return cmdRead, 4096 })
		}
		require.Empty(t, v.Server.disks.At(1).Troubles(time.Now().Add(time.Hour)))
	}
}
