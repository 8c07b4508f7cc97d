package target_test

import (
	"context"
	"net"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// startStorage serves a disk that is not in the page cache as LUN 1. It also returns the first MiB
// of its content.
func startStorage(t *testing.T, change ...func(*options)) (*server, *disktest.Storage, []byte) {
	d := disktest.NewStorage(disktest.NewMemory(diskSize))
	content := pattern(1<<20, 5)
	require.NoError(t, testtool.Err(d.WriteAt(t.Context(), content, 0)))
	change = slices.Insert(change, 0, func(o *options) { o.LUNs[0].Disk = d })
	s := start(t, change...)
	t.Cleanup(d.Arrive)
	return s, d, content
}

const late = 24 // reads that wait

func startLate(t *testing.T, c *tt.Session) (all []*tt.Task) {
	for i := range late {
		all = append(all, c.MustStart(t, tt.Read10(1, uint32(8*i), 8)))
	}
	return all
}

// TestReadsThatWaitForStorage: they hold up nobody, get their own data, and those that were aborted
// get no answer. No ping sends what was left in the queue.
func TestReadsThatWaitForStorage(t *testing.T) {
	s, d, content := startStorage(t, func(o *options) { o.Limits.NOPInterval = time.Hour })
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	all := startLate(t, c)
	c.MustGood(t, tt.Read10(1, diskSize/2/tt.BlockSize, 8))
	c.MustGood(t, tt.Write10(1, 1000, make([]byte, tt.BlockSize)))
	c.MustGood(t, tt.Read10(2, 0, 8))
	require.NoError(t, testtool.Err(c.Ping(nil)))
	require.Equal(t, late, s.Sessions()[0].InFlight)
	for _, i := range []int{late - 1, 3, 0} {
		require.Equal(t, pdu.TMComplete, testtool.Must(c.AbortTask(all[i]))(t))
		c.Forget(all[i])
		all = slices.Delete(all, i, i+1)
	}
	d.Arrive()
	for _, task := range all {
		at := int(task.CmdSN()-all[0].CmdSN()+1) * 8 * tt.BlockSize // the first was aborted
		require.Equal(t, content[at:at+8*tt.BlockSize], task.MustFinish(t).Data)
	}
	require.NoError(t, c.ExpectOnlyPing())
	testtool.Eventually(t, func() bool { return s.Sessions()[0].InFlight == 0 }, "all have ended")
}

// TestReaderIsReplacedWhileItAsks: to ask the page cache can take long, as it begins to read. The
// reader that has come instead may wait for the peer when the request is left for later.
func TestReaderIsReplacedWhileItAsks(t *testing.T) {
	s, d, content := startStorage(t, func(o *options) { o.Limits.NOPInterval = time.Hour })
	told := make(chan struct{})
	d.Asked = func() { <-told }
	d.Arrive()
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	task := c.MustStart(t, tt.Read10(1, 0, 8))
	c.MustGood(t, tt.Read10(1, diskSize/2/tt.BlockSize, 8))
	close(told)
	require.Equal(t, content[:8*tt.BlockSize], task.MustFinish(t).Data)
}

// TestAnswerBeforeAReadThatHangs: it is sent, although the goroutine that was to send it hangs in
// the next read, and nothing else is left to do.
func TestAnswerBeforeAReadThatHangs(t *testing.T) {
	s, d, _ := startStorage(t, func(o *options) { o.Limits.NOPInterval = time.Hour })
	d.Arrive()
	told := make(chan struct{})
	defer close(told)
	var asked, read atomic.Int32
	d.Asked = func() {
		if asked.Add(1) == 6 { // the third read, once more
			<-told
		}
	}
	d.Then = func() {
		if read.Add(1) == 1 { // it is slow, so a goroutine executes the other two
			time.Sleep(3 * time.Millisecond)
		}
		for read.Load() == 2 && asked.Load() < 5 { // until the third read was left for later, too
			runtime.Gosched()
		}
	}
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	c.MustGood(t, tt.Read10(1, 0, 8))
	answered := c.MustStart(t, tt.Read10(1, 8, 8))
	c.MustStart(t, tt.Read10(1, 16, 8))
	answered.MustFinish(t)
}

// TestLateReadsLeaveNothing: a session that ends with reads that wait gives their memory back, and
// so does one that a bug ends.
func TestLateReadsLeaveNothing(t *testing.T) {
	for _, broken := range []bool{false, true} {
		s, d, _ := startStorage(t, func(o *options) { o.Log = zap.NewNop() })
		if broken {
			d.Then = func() { panic("a bug in the disk") }
		}
		before := s.MemoryInUse()
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
		startLate(t, c)
		testtool.Eventually(t, func() bool { return d.Waiting() > 0 }, "a read waits")
		if !broken {
			require.NoError(t, c.Reset())
			testtool.Eventually(t, func() bool { return len(s.Sessions()) == 0 }, "it has ended")
		}
		d.Arrive()
		testtool.Eventually(t, func() bool {
			return s.MemoryInUse() == before && d.Waiting() == 0
		}, "nothing is held: %v", func() any { return s.MemoryInUse() - before })
		s.bugs = s.seen.count("panic")
		require.Equal(t, broken, s.bugs > 0)
	}
}

// TestLateReadsOfAPeerThatGoes: a peer that takes none of the answers to reads that had to wait,
// and goes, says nothing about the disk: neither that a call of it stalls, nor that one fails.
func TestLateReadsOfAPeerThatGoes(t *testing.T) {
	s, d, _ := startStorage(t)
	d.Arrive()
	c, nc := s.loginFrom(t, "127.0.0.1", tt.LoginOptions{})
	require.NoError(t, nc.(*net.TCPConn).SetReadBuffer(64<<10))
	// The commands that an initiator may have at once fill the buffers of every socket.
	const blocks = 256
	for i := range 120 {
		cmd, _, _ := c.Prepare(tt.Read10(1, uint32(i%25*blocks), blocks))
		require.NoError(t, c.Send(&cmd, nil))
	}
	testtool.Eventually(t, func() bool {
		waiting := s.Queued()
		time.Sleep(50 * time.Millisecond)
		return waiting > 0 && s.Queued() == waiting
	}, "it waits for the peer")
	// On a busy machine, a call of the disk may have looked stalled for a moment.
	testtool.Eventually(t, func() bool { return s.Stalls(1) == 0 }, "the peer is no stall")
	require.NoError(t, nc.Close())
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 0 }, "it is gone")
	require.Empty(t, s.inUse.At(1).Troubles(time.Now()))
}

// stalling says that storage must be waited for when it is let.
type stalling struct {
	*disktest.Storage
	stalled atomic.Int32
	gate    chan struct{}
}

func (d *stalling) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if ctx == disk.Cached {
		d.stalled.Add(1)
		<-d.gate
	}
	return d.Storage.ReadAt(ctx, p, off)
}

// TestReadIsLateAfterTheEnd: a goroutine may find out that a read has to wait when it is no reader
// any more, and the session is gone. The read leaves nothing.
func TestReadIsLateAfterTheEnd(t *testing.T) {
	d := &stalling{gate: make(chan struct{})}
	s, _, _ := startStorage(t, func(o *options) {
		d.Storage = o.LUNs[0].Disk.(*disktest.Storage)
		o.LUNs[0].Disk = d
	})
	before := s.MemoryInUse()
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	c.MustStart(t, tt.Read10(1, 0, 8))
	testtool.Eventually(t, func() bool { return d.stalled.Load() > 0 }, "the reader is in the disk")
	require.NoError(t, c.Reset())
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 0 }, "it has ended")
	close(d.gate)
	testtool.Eventually(t, func() bool { return s.MemoryInUse() == before },
		"nothing is held: %v", func() any { return s.MemoryInUse() - before })
}
