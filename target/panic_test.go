package target_test

import (
	"bytes"
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	tt "kubevirt.io/disk/target/targettest"
)

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
