package control

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// TestHandoverThatCannotRunOut checks that a failed expiry logs one line, which does not say that
// the handover is over, and that no timer starts once the daemon stops.
func TestHandoverThatCannotRunOut(t *testing.T) {
	luns := newFakeLUNs()
	core, log := observer.New(zap.InfoLevel)
	c := newHandovers(luns, zap.New(core))
	require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
	luns.broken = unix.ENOSPC
	c.expire(2, c.openings[2])
	lines := log.TakeAll()
	require.Len(t, lines, 1)
	require.Equal(t, zap.ErrorLevel, lines[0].Level)
	require.Contains(t, c.openings, uint16(2), "it is tried again")

	timer := c.openings[2].timer
	c.stopTimers()
	require.False(t, timer.Stop(), "it is stopped already")
	c.arm(3, time.Hour)
	require.NotContains(t, c.openings, uint16(3))
}

// TestHandoverRunsOutOnBrokenStorage lets the time run out while storage fails. The log says that
// the LUN is open to both. The handover ends when storage works again.
func TestHandoverRunsOutOnBrokenStorage(t *testing.T) {
	f := newFakeLUNs()
	f.broken = errors.New("no space left")
	core, log := observer.New(zap.WarnLevel)
	c := newHandovers(f, zap.New(core))
	defer c.stopTimers()
	require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
	for i, absent := range []bool{false, true} {
		f.absent = absent
		c.expire(2, c.openings[2])
		said := log.FilterMessageSnippet("open to both").FilterField(zap.Error(f.broken))
		require.Len(t, said.All(), i+1)
		require.Contains(t, c.openings, uint16(2), "it is tried again")
	}
	f.broken, f.absent = nil, false
	c.expire(2, c.openings[2])
	owner, guest := f.state(2)
	require.Equal(t, second, owner)
	require.Empty(t, guest)
}

// TestHandoverRunsOutWithoutTheSecond lets the time run out while the second initiator is not
// logged in. The guest has not moved.
func TestHandoverRunsOutWithoutTheSecond(t *testing.T) {
	f := newFakeLUNs()
	f.absent = true
	core, log := observer.New(zap.InfoLevel)
	c := newHandovers(f, zap.New(core))
	require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
	c.expire(2, c.openings[2])
	require.Equal(t, second, log.All()[0].ContextMap()["fenced"])
	owner, guest := f.state(2)
	require.Empty(t, owner)
	require.Empty(t, guest)
	require.Empty(t, c.openings)
}

// TestHandoverRunsOutOnWeakStorage lets storage fail once. The second initiator, which runs the
// guest, must not be fenced for that.
func TestHandoverRunsOutOnWeakStorage(t *testing.T) {
	f := newFakeLUNs()
	f.broken, f.once = errors.New("no space left"), true
	c := newHandovers(f, zap.NewNop())
	defer c.stopTimers()
	require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
	c.expire(2, c.openings[2])
	_, guest := f.state(2)
	require.Equal(t, second, guest)
	c.expire(2, c.openings[2])
	owner, _ := f.state(2)
	require.Equal(t, second, owner)
}

// TestHandoverResumed restarts the daemon while LUNs are open. Their time goes on and is long
// enough for both machines to log in again.
func TestHandoverResumed(t *testing.T) {
	f := newFakeLUNs()
	c := newHandovers(f, zap.NewNop())
	for lun, open := range map[uint16]time.Duration{2: time.Hour, 3: time.Nanosecond, 4: 0} {
		req := openFor(lun, 0)
		req.Seconds = open.Seconds()
		require.NoError(t, testtool.Err(c.do(t.Context(), req)))
	}
	c.stopTimers()

	core, log := observer.New(zap.InfoLevel)
	again := newHandovers(f, zap.New(core))
	defer again.stopTimers()
	again.resume(func(uint16) bool { return true })
	require.Contains(t, again.openings, uint16(2))
	require.Contains(t, again.openings, uint16(3), "neither ended at once nor open for good")
	require.NotContains(t, again.openings, uint16(4), "until it is finished or cancelled")
	left := map[any]any{}
	for _, line := range log.All() {
		left[line.ContextMap()["lun"]] = line.ContextMap()["for"]
	}
	require.Len(t, left, 3)
	require.Greater(t, left[uint16(2)], 30*time.Minute)
	require.Equal(t, resumeGrace, left[uint16(3)])
	require.Nil(t, left[uint16(4)])
}

// TestEndOfAHandoverEndsItsTime checks that finish and cancel stop the timer, and that they do not
// if they are refused.
func TestEndOfAHandoverEndsItsTime(t *testing.T) {
	for _, action := range []status.Action{status.ActionFinish, status.ActionCancel} {
		luns := newFakeLUNs()
		c := newHandovers(luns, zap.NewNop())
		defer c.stopTimers()
		require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
		luns.broken, luns.once = unix.ENOSPC, false
		_, err := c.do(t.Context(), status.Handover{Action: action, LUN: 2})
		require.ErrorIs(t, err, unix.ENOSPC)
		require.Contains(t, c.openings, uint16(2), action)
		luns.broken = nil
		require.NoError(t, testtool.Err(c.do(t.Context(), status.Handover{Action: action, LUN: 2})))
		require.Empty(t, c.openings, action)
	}
}

// TestHandoverRunsOut checks that the log says who is fenced, or that nobody is.
func TestHandoverRunsOut(t *testing.T) {
	luns := newFakeLUNs()
	core, log := observer.New(zap.InfoLevel)
	c := newHandovers(luns, zap.New(core))
	for former, said := range map[string]string{
		"": "nobody is fenced", "iqn.2026-01.test:source": "the former owner is fenced",
	} {
		luns.owner[2] = former
		require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
		c.expire(2, c.openings[2])
		lines := log.TakeAll()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0].Message, said)
		require.Equal(t, zap.InfoLevel, lines[0].Level)
		require.Equal(t, former, lines[0].ContextMap()["fenced"])
		require.Empty(t, c.openings)
	}
}
