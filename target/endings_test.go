package target_test

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
