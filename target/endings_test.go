package target_test

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// endings counts writes by the status that the observer gets.
type endings struct {
	*events
	mu     sync.Mutex
	writes map[uint8]int // guarded by mu
}

func (e *endings) RequestDone(c serving.RequestEvent) {
	e.events.RequestDone(c)
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.Op == serving.OpWrite {
		e.writes[c.Status]++
	}
}

func (e *endings) of(status uint8) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.writes[status]
}

// TestEveryCommandIsCountedOnce ends commands in every way: with an answer, by an abort while they
// wait for data or are in the disk, and with their session. The observer learns of each once, with
// its status.
func TestEveryCommandIsCountedOnce(t *testing.T) {
	const good, conflict, aborted = 0x00, 0x18, 0x40
	seen := &endings{writes: map[uint8]int{}}
	s := start(t, func(o *options) {
		seen.events = o.Shared.Observer.(*events)
		o.Shared.Observer, o.LUNs[1].Access = seen, serving.AccessWriteExclusive
	})
	c := tt.MustLogin(t, s.addr, solicited, 1, 2)
	data := make([]byte, 4096)
	c.MustGood(t, tt.Write10(1, 0, data))
	c.MustGood(t, tt.Write10(2, 0, data))
	require.Equal(t, 2, seen.of(good))

	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 1)
	r := testtool.Must(other.Do(tt.Write10(2, 0, data)))(t)
	if r.Sense.Key == 6 { // the unit attention after the login
		r = testtool.Must(other.Do(tt.Write10(2, 0, data)))(t)
	}
	require.EqualValues(t, conflict, r.Status)
	require.Equal(t, 1, seen.of(conflict))

	held, _ := waiting(t, c, 1, 0, data)
	aborts(t, c, held)
	require.Equal(t, 1, seen.of(aborted), "it waited for data")

	resume, hangs := s.stall(t, disktest.OpWrite)
	stuck, r2t := waiting(t, c, 1, 0, data)
	require.NoError(t, stuck.Answer(r2t))
	hangs(1)
	aborts(t, c, stuck)
	resume()
	testtool.Eventually(t, func() bool { return seen.of(aborted) == 2 }, "it has ended")

	waiting(t, c, 1, 0, data)
	require.NoError(t, c.Close())
	testtool.Eventually(t, func() bool { return seen.of(aborted) == 3 }, "its session has ended")
	require.Equal(t, 2, seen.of(good))
	require.Equal(t, 1, seen.of(conflict))
}

// lateContext has ended. From the second call on, Done calls late first.
type lateContext struct {
	context.Context
	asked atomic.Int64
	late  func()
}

func (c *lateContext) Done() <-chan struct{} {
	if c.asked.Add(1) > 1 {
		c.late()
	}
	return c.Context.Done()
}

// TestShutdownCutsOff: if a session is cut off, Shutdown returns an error, even if nothing is left
// of the session by then.
func TestShutdownCutsOff(t *testing.T) {
	for range 10 {
		s := start(t)
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
		ended, end := context.WithCancel(context.Background())
		end()
		ctx := &lateContext{Context: ended, late: func() {
			for range 100 { // the last goroutine ends soon after the last connection
				all, _ := s.Connections()
				time.Sleep(time.Millisecond)
				if all == 0 {
					return
				}
			}
		}}
		require.ErrorIs(t, s.Shutdown(ctx), context.Canceled)
		require.NoError(t, c.Close())
	}
}

// TestReinstatedSessionIsFenced fences a session whose reinstatement has begun but not ended. Its
// writes must be over, too.
func TestReinstatedSessionIsFenced(t *testing.T) {
	const first, second = "iqn.2026-01.test:first", "iqn.2026-01.test:second"
	for name, c := range map[string]struct {
		access serving.AccessMode
		fence  func(t *testing.T, s *server, other *tt.Session)
	}{
		"handover": {serving.AccessWriteExclusive, func(t *testing.T, s *server, _ *tt.Session) {
			require.NoError(t, s.inUse.Admit(1, second, time.Time{}))
			require.NoError(t, testtool.Err(s.inUse.HandOver(1)))
		}},
		"LOGICAL UNIT RESET": {serving.AccessWriteShared,
			func(t *testing.T, s *server, other *tt.Session) {
				manageAll(t, other, pdu.TMComplete, pdu.TMLogicalUnitReset)
			}},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, func(o *options) { o.LUNs[0].Access = c.access })
			old := tt.MustLogin(t, s.addr,
				tt.LoginOptions{Initiator: first, Keys: solicited.Keys}, 1)
			task, r2t := waiting(t, old, 1, 0, bytes.Repeat([]byte{1}, 512))
			other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: second})

			require.NoError(t, s.BeginReinstatement(first))
			c.fence(t, s, other)
			_ = task.Answer(r2t)
			require.NoError(t, old.ExpectClosed(), "without an answer")
			require.Zero(t, s.disks[0].Calls(disktest.OpWrite))
		})
	}
}

// panicky is a disk with a bug.
type panicky struct{ *disktest.Memory }

func (panicky) ReadAt(context.Context, []byte, int64) (int, error) { panic("a bug in the disk") }

func (p panicky) WriteAt(ctx context.Context, b []byte, off int64) (int, error) {
	if b[0] == 'X' {
		panic("another bug in the disk")
	}
	return p.Memory.WriteAt(ctx, b, off)
}

// waitsAndPanics is a disk whose reads wait for a while and then panic.
type waitsAndPanics struct {
	*disktest.Memory
	begun  atomic.Int64
	resume chan struct{}
}

func (d *waitsAndPanics) ReadAt(context.Context, []byte, int64) (int, error) {
	d.begun.Add(1)
	<-d.resume
	panic("a bug in the disk")
}

// TestManyPanicsLeaveNothing causes panics with every kind of memory in use, in readers and in
// goroutines that lost the reading role. Afterwards all memory is free, and each panic was counted
// and logged with its stack.
func TestManyPanicsLeaveNothing(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	slow := &waitsAndPanics{Memory: disktest.NewMemory(1 << 20), resume: make(chan struct{})}
	s := start(t, func(o *options) {
		o.LUNs[0].Disk, o.LUNs[1].Disk, o.Log = panicky{disktest.NewMemory(1 << 20)}, slow,
			zap.New(core)
	})
	expected := 0
	end := func(c *tt.Session) {
		expected++
		require.NoError(t, testtool.Err(c.ExpectClosedAfter()))
	}
	for range 20 {
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
		c.MustStart(t, tt.Read10(1, 0, 512))
		end(c)
		c = tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
		c.MustStart(t, tt.Write10(1, 0, bytes.Repeat([]byte("X"), 128<<10)))
		end(c)
	}
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 2)
	hangs := c.MustStart(t, tt.Read10(2, 0, 512))
	c.MustStart(t, tt.Read10(2, 0, 512))
	testtool.Eventually(t, func() bool { return slow.begun.Load() == 2 }, "both hang in the disk")
	require.NoError(t, testtool.Err(c.Ping(nil)))
	require.NoError(t, testtool.Err(c.AbortTask(hangs)))
	close(slow.resume)
	expected++ // two goroutines of one session
	end(c)
	testtool.Eventually(t, func() bool {
		all, _ := s.Connections()
		return all == 0 && len(s.Sessions()) == 0 && s.MemoryInUse() == 0
	}, "nothing is held")
	s.bugs = expected
	// A goroutine gives everything back before it reports its panic.
	testtool.Eventually(t,
		func() bool { return s.seen.count("panic") == expected && logs.Len() == expected },
		"each is counted and logged")
	for _, entry := range logs.All() {
		stack, _ := entry.ContextMap()["stack"].(string)
		require.True(t, strings.Contains(stack, "ReadAt") || strings.Contains(stack, "WriteAt"),
			stack)
	}
}

// buggyObserver panics in a call with locks held, before a response is sent.
type buggyObserver struct {
	events
	armed atomic.Bool
}

func (o *buggyObserver) RequestDone(e serving.RequestEvent) {
	if o.armed.Load() && e.Number == 1 {
		panic("a bug in the observer")
	}
}

// TestPanicWithLocksHeld has a bug in the worst place. The session ends, its locks are free, others
// go on, and the server can be closed.
func TestPanicWithLocksHeld(t *testing.T) {
	seen := new(buggyObserver)
	s := start(t, func(o *options) { o.Shared.Observer = seen })
	bystander := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:bystander"},
		2)
	for _, command := range []tt.Command{tt.Read10(1, 0, 8), tt.Write10(1, 0, make([]byte, 512)),
		tt.TestUnitReady(1)} {
		seen.armed.Store(false)
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
		seen.armed.Store(true)
		before := seen.count("panic")
		c.MustStart(t, command)
		require.NoError(t, testtool.Err(c.ExpectClosedAfter()))
		testtool.Eventually(t,
			func() bool { return seen.count("panic") == before+1 }, "it is counted")
		bystander.MustGood(t, tt.Read10(2, 0, 1))
	}
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 1 }, "the sessions end")
	require.NoError(t, bystander.Close())
	testtool.Eventually(t,
		func() bool { all, _ := s.Connections(); return all == 0 && s.MemoryInUse() == 0 },
		"nothing is held")
}
