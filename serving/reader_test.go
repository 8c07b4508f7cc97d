package serving

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// queue is a connection: requests that the goroutine with the role takes in turn.
type queue struct {
	requests chan func(*Turn)
	ended    sync.WaitGroup
}

func newQueue(t *testing.T, s *Disks) *queue {
	q := &queue{requests: make(chan func(*Turn))}
	r := s.NewReader(new(Conn), func(turn *Turn) {
		defer q.ended.Done()
		for request := range q.requests {
			request(turn)
			if !turn.Reading {
				return
			}
		}
	}, func() { q.ended.Add(1) })
	q.ended.Add(1)
	go r.Run()
	t.Cleanup(func() {
		close(q.requests)
		q.ended.Wait()
		r.Close()
	})
	return q
}

func oneDisk(t *testing.T, log *zap.Logger) (*Disks, *Disk) {
	s := New(Config{Log: log})
	require.NoError(t, s.Add(Options{Number: 1, Disk: disktest.NewMemory(1 << 20),
		Identity: disk.Identity{Serial: "x", NAA: [8]byte{0x30}}}))
	return s, s.At(1)
}

// TestAStalledReaderIsReplaced: while one request hangs in the disk, others go on. When the disk
// has been stuck for a while, requests for it no longer delay anybody. All that wait are trouble.
func TestAStalledReaderIsReplaced(t *testing.T) {
	s, d := oneDisk(t, nil)
	q := newQueue(t, s)
	answer, done := make(chan struct{}), make(chan bool, 100)
	hang := func(turn *Turn) {
		turn.Enter(d)
		<-answer
		turn.Leave()
		done <- turn.Reading
	}
	q.requests <- hang
	other := make(chan *Turn)
	q.requests <- func(turn *Turn) { other <- turn }
	require.True(t, (<-other).Reading)
	require.Equal(t, 1, d.Stalled())
	testtool.Eventually(t, d.stall.stuck.Load, "the disk is stuck")
	for range 20 {
		q.requests <- hang
	}
	require.Empty(t, d.Troubles(time.Now()), "nobody has waited for long")
	testtool.Eventually(t, func() bool {
		all := d.Troubles(time.Now().Add(LongWait))
		return len(all) == 1 && all[0].Kind == status.TroubleStorage && all[0].Count == 21
	}, "21 requests wait: %v", func() any { return d.Troubles(time.Now().Add(LongWait)) })
	close(answer)
	for range 21 {
		require.False(t, <-done, "each has lost the role over its request")
	}
	require.Empty(t, d.Troubles(time.Now().Add(LongWait+time.Hour)), "nobody waits any more")
	require.Zero(t, d.Stalled())
	q.requests <- func(turn *Turn) {
		turn.Enter(d)
		turn.Leave()
		done <- turn.Reading
	}
	require.True(t, <-done, "the disk is as any other again")
}

// TestAStuckDiskGetsSoManyThreads: each call that hangs holds a thread of the process, which has
// only so many. When they are used up, a connection waits for its call, until others have ended.
func TestAStuckDiskGetsSoManyThreads(t *testing.T) {
	s, d := oneDisk(t, nil)
	answer, entered, done := make(chan struct{}), make(chan bool), make(chan bool, maxInCalls+2)
	release := sync.OnceFunc(func() { close(answer) })
	defer release()
	hang := func(turn *Turn) {
		turn.Enter(d)
		entered <- turn.Reading
		<-answer
		turn.Leave()
		done <- turn.Reading
	}
	q := newQueue(t, s)
	q.requests <- hang
	require.True(t, <-entered)
	testtool.Eventually(t, d.stall.stuck.Load, "the disk is stuck")
	for range maxInCalls - 1 {
		q.requests <- hang
		require.False(t, <-entered, "it hands the role on before the call")
	}
	for range 2 { // the second request is of another connection
		q.requests <- hang
		require.True(t, <-entered, "it waits for the call")
		q = newQueue(t, s)
	}
	time.Sleep(10 * stallTick) // the watchdog looks
	require.EqualValues(t, maxInCalls, s.watch.inCalls.Load())
	release()
	for range maxInCalls + 2 {
		<-done
	}
	testtool.Eventually(t, func() bool { return s.watch.inCalls.Load() == 0 }, "none is left")
}

// TestASlowDiskGetsSeveralRequests: after a slow call, other goroutines execute the next requests,
// up to a limit.
func TestASlowDiskGetsSeveralRequests(t *testing.T) {
	s, d := oneDisk(t, nil)
	q := newQueue(t, s)
	new(Turn).Took(&Request{}, d, slowCall+1)
	answer, entered := make(chan struct{}), make(chan bool)
	for range slowCalls {
		q.requests <- func(turn *Turn) {
			turn.Enter(d)
			entered <- turn.Reading && !turn.Lost()
			<-answer
			turn.Leave()
		}
		require.False(t, <-entered)
	}
	require.Equal(t, slowParallel, d.Shared())
	require.False(t, new(Turn).Share(d), "the limit is reached")
	close(answer)
	testtool.Eventually(t, func() bool { return d.Shared() == 0 },
		"no request has the disk: %d", func() any { return d.Shared() })
	require.True(t, new(Turn).Share(d))
	s.watch.inCalls.Add(maxInCalls)
	q.requests <- func(turn *Turn) { entered <- turn.Share(d) }
	require.False(t, <-entered, "all disks together have a limit, too")
	q.requests <- func(turn *Turn) { // a read of several pieces, which waits for storage
		turn.Enter(d)
		entered <- turn.PassOnCall()
		turn.Leave()
	}
	require.False(t, <-entered)
	s.watch.inCalls.Add(-maxInCalls)
	testtool.Eventually(t, func() bool { return s.watch.inCalls.Load() == 0 })
}

// TestTheWatchdogEnds when there are no calls, and begins again with the next one.
func TestTheWatchdogEnds(t *testing.T) {
	s, d := oneDisk(t, nil)
	q := newQueue(t, s)
	for range 2 {
		q.requests <- func(turn *Turn) { turn.Enter(d); turn.Leave() }
		testtool.Eventually(t, s.watch.awake.Load, "it works")
		testtool.Eventually(t, func() bool { return !s.watch.awake.Load() }, "it has ended")
	}
}
