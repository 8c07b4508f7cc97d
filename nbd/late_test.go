package nbd

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

const late = 24 // reads that wait

// serveStorage serves a disk that is not in the page cache. Each of its blocks is full of its
// number.
func serveStorage(t *testing.T) (*served, *disktest.Storage) {
	t.Helper()
	d := disktest.NewStorage(disktest.NewMemory(diskSize))
	for i := range late {
		require.NoError(t, testtool.Err(d.WriteAt(t.Context(), lateBlock(i), int64(i)*4096)))
	}
	v := serve(t, 1, func(o *serving.Options) { o.Disk, o.Access = d, serving.AccessWriteShared })
	t.Cleanup(d.Arrive)
	return v, d
}

func lateBlock(i int) []byte { return bytes.Repeat([]byte{byte(1 + i)}, 4096) }

// readLate begins with that many reads, which have the first cookies.
func (c *client) readLate(n int) {
	c.t.Helper()
	var all []byte
	for i := range n {
		all = append(all, c.request(cmdRead, 0, uint64(i%late)*4096, 4096, nil)...)
	}
	c.send(all)
}

// finishLate takes the answers of readLate, in any order.
func (c *client) finishLate(n int) {
	c.t.Helper()
	seen := map[uint64]bool{}
	for range n {
		cookie, a := c.answer(func(uint64) (uint16, uint64) { return cmdRead, 4096 })
		c.good(a)
		require.False(c.t, seen[cookie])
		seen[cookie] = true
		for _, data := range a.data {
			require.Equal(c.t, lateBlock(int(cookie-1)%late), data)
		}
	}
}

// TestReadsThatWaitForStorage: they hold up nobody, and get their own data.
func TestReadsThatWaitForStorage(t *testing.T) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) {
			v, d := serveStorage(t)
			c := v.open(t, "", mode)
			c.readLate(late)
			require.Equal(t, make([]byte, 4096), c.readAt(diskSize/2, 4096))
			c.writeAt(diskSize/2, []byte("abc"))
			require.Zero(t, c.do(cmdFlush, 0, 0, 0, nil).code)
			require.Equal(t, []byte("abc"), c.readAt(diskSize/2, 3))
			d.Arrive()
			c.finishLate(late)
			c.alive()
		})
	}
}

// TestReaderIsReplacedWhileItAsks: to ask the page cache can take long, as it begins to read. The
// reader that has come instead may wait for the peer when the request is left for later.
func TestReaderIsReplacedWhileItAsks(t *testing.T) {
	v, d := serveStorage(t)
	told := make(chan struct{})
	d.Asked = func() { <-told }
	d.Arrive()
	c := v.open(t, "", structured)
	c.readLate(1)
	require.Equal(t, make([]byte, 4096), c.readAt(diskSize/2, 4096))
	close(told)
	c.finishLate(1)
}

// TestEndsWithLateReads: whatever ends a connection with reads that wait for storage, the session
// is gone at once, and nothing is held when the storage has answered.
func TestEndsWithLateReads(t *testing.T) {
	for name, end := range map[string]func(v *served, c *client){
		"closed": func(_ *served, c *client) { require.NoError(t, c.Close()) },
		"disconnects": func(_ *served, c *client) {
			c.send(c.request(cmdDisconnect, 0, 0, 0, nil))
		},
		"kicked": func(v *served, _ *client) {
			v.EndSessions(func(status.Session) bool { return true })
		},
		"removed": func(v *served, _ *client) { _, _ = v.Server.disks.Remove(1) },
	} {
		t.Run(name, func(t *testing.T) {
			v, d := serveStorage(t)
			c := v.open(t, "", structured)
			c.readLate(late)
			testtool.Eventually(t, func() bool { return d.Waiting() > 0 })
			end(v, c)
			testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 })
			require.Positive(t, d.Waiting())
			d.Arrive()
			testtool.Eventually(t, func() bool {
				return d.Waiting() == 0 && v.Server.disks.Memory.Used() == 0
			})
		})
	}
}

// TestABugInALateRead ends the connection, and nothing is held.
func TestABugInALateRead(t *testing.T) {
	v, d := serveStorage(t)
	d.Then = func() { panic("a bug in the disk") }
	c := v.open(t, "", structured)
	c.readLate(late)
	testtool.Eventually(t, func() bool { return d.Waiting() > 0 })
	d.Arrive()
	testtool.Eventually(t, func() bool {
		return len(v.Sessions()) == 0 && v.Server.disks.Memory.Used() == 0
	})
}

// stopping begins to stop the server. It returns when the readers of connections have seen that.
func (v *served) stopping(t *testing.T) <-chan error {
	t.Helper()
	done := testtool.Go(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), testtool.Timeout)
		defer cancel()
		return v.Shutdown(ctx)
	})
	testtool.Eventually(t, v.conns.Closing)
	time.Sleep(20 * time.Millisecond) // for the reader to see that
	return done
}

// TestShutdownAnswersLateReads: what was read from the connection is answered first.
func TestShutdownAnswersLateReads(t *testing.T) {
	v, d := serveStorage(t)
	c := v.open(t, "", structured)
	c.readLate(late)
	testtool.Eventually(t, func() bool { return d.Waiting() == late },
		"each has a goroutine, as the disk is stuck")
	done := v.stopping(t)
	d.Arrive()
	c.finishLate(late)
	require.NoError(t, <-done)
}

// TestShutdownAnswersWhatIsUnderWay: so is what takes long in the disk.
func TestShutdownAnswersWhatIsUnderWay(t *testing.T) {
	v := serve(t, 1, nil)
	gate := make(chan struct{})
	opened := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(opened)
	v.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Block: gate})
	c := v.open(t, "", structured)
	c.send(c.request(cmdWrite, 0, 0, 4096, lateBlock(0)))
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpWrite) > 0 })
	c.readAt(8192, 4096) // by another goroutine
	done := v.stopping(t)
	opened()
	_, written := c.answer(func(uint64) (uint16, uint64) { return cmdWrite, 0 })
	c.good(written)
	require.NoError(t, <-done)
}

// TestReadsSeeNothingHalfDone: a change of several steps by another protocol, such as a COMPARE AND
// WRITE, is not seen in its middle.
func TestReadsSeeNothingHalfDone(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteShared })
	alone := serve(t, 1, nil)
	relay := serve(t, 1, func(o *serving.Options) {
		o.Disk, o.Access = alone.remote(t, "disk1.raw"), serving.AccessWriteShared
	})
	for _, at := range []struct{ serves, stores *served }{{v, v}, {relay, alone}} {
		c, ranges := at.serves.open(t, "", structured), &at.serves.Server.disks.At(1).Ranges
		for i, length := range []uint64{4096, chunk} {
			var h rangelock.Hold
			h.Set(rangelock.Exclusive, "", 0, 4096)
			ranges.Lock(&h)
			c.send(c.request(cmdRead, 0, 0, length, nil))
			testtool.Eventually(t, func() bool { return ranges.State().Waiting == 1 })
			err := testtool.Err(at.stores.disks[0].WriteAt(t.Context(), lateBlock(i), 0))
			require.NoError(t, err)
			ranges.Unlock(&h)
			_, read := c.answer(func(uint64) (uint16, uint64) { return cmdRead, 0 })
			c.good(read)
			require.Equal(t, lateBlock(i), read.data[0][:4096])
		}
	}
}

// TestLateReadsAreFew: of a client that does not wait for answers, so many reads wait beside its
// reader, and the others as requests that the limit of memory has.
func TestLateReadsAreFew(t *testing.T) {
	v, d := serveStorage(t)
	c := v.open(t, "", structured)
	const all = 4 * maxLate
	c.readLate(all)
	most := func() (n int) {
		v.Server.mu.Lock()
		defer v.Server.mu.Unlock()
		for _, c := range v.conns.All(func(c *conn) bool { return c.late != nil }) {
			n = max(n, c.late.Waiting())
		}
		return n
	}
	testtool.Eventually(t, func() bool { return most() >= maxLate/2 })
	for range 100 {
		require.LessOrEqual(t, most(), maxLate)
		time.Sleep(time.Millisecond)
	}
	d.Arrive()
	c.finishLate(all)
}

// busyDisk notes how many reads there were at once. They wait at the gate.
type busyDisk struct {
	disk.Disk
	gate             chan struct{}
	now, most, calls atomic.Int32
}

func (d *busyDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	d.calls.Add(1)
	now := d.now.Add(1)
	defer d.now.Add(-1)
	for most := d.most.Load(); now > most && !d.most.CompareAndSwap(most, now); {
		most = d.most.Load()
	}
	<-d.gate
	return d.Disk.ReadAt(context.Background(), p, off)
}

// TestLongRequestsAreFew: a connection that floods the server with long requests has a few of them
// executed at once. Those of others are executed beside.
func TestLongRequestsAreFew(t *testing.T) {
	d := &busyDisk{Disk: disktest.NewMemory(2 * longRequest), gate: make(chan struct{})}
	opened := sync.OnceFunc(func() { close(d.gate) })
	v := serve(t, 1, func(o *serving.Options) { o.Disk, o.Access = d, serving.AccessWriteShared })
	t.Cleanup(opened)
	const flood, others = 100, 3
	c := v.open(t, "", extended)
	for range flood {
		c.send(c.request(cmdCache, 0, 0, 2*longRequest, nil))
	}
	testtool.Eventually(t, func() bool { return d.now.Load() >= maxLong+1 }, "a few are executed")
	other := v.open(t, "", structured)
	for range others { // each is executed beside the ones before when the watchdog has seen those
		other.send(other.request(cmdRead, 0, 0, 512, nil))
	}
	testtool.Eventually(t, func() bool { return d.now.Load() >= maxLong+1+others },
		"others are, too")
	opened()
	for range others {
		_, a := other.answer(func(uint64) (uint16, uint64) { return cmdRead, 512 })
		other.good(a)
	}
	for range flood {
		_, a := c.answer(func(uint64) (uint16, uint64) { return cmdCache, 0 })
		c.good(a)
	}
	require.LessOrEqual(t, d.most.Load(), int32(maxLong+1+others))
}

// TestClientThatLeavesLongRequests: of a client that is gone, nothing is executed any more, and it
// has no session, also when its reader executes one of its long requests.
func TestClientThatLeavesLongRequests(t *testing.T) {
	d := &busyDisk{Disk: disktest.NewMemory(2 * longRequest), gate: make(chan struct{})}
	v := serve(t, 1, func(o *serving.Options) { o.Disk, o.Access = d, serving.AccessWriteShared })
	opened := sync.OnceFunc(func() { close(d.gate) })
	t.Cleanup(opened)
	c := v.open(t, "", extended)
	for range 40 {
		c.send(c.request(cmdCache, 0, 0, 2*longRequest, nil))
	}
	testtool.Eventually(t, func() bool { return d.now.Load() >= maxLong+1 }, "a few are executed")
	v.conns.LookNow(time.Now())
	require.Len(t, v.Sessions(), 1, "it is still there")
	require.NoError(t, c.Close())
	v.conns.LookNow(time.Now())
	before := d.calls.Load()
	opened()
	testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 }, "it has gone")
	require.Equal(t, before, d.calls.Load(), "each that was begun ends at its next piece")
}
