package control

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// fakeLUNs are LUNs that "a" owns. Each handover of LUN 1 waits for the test, as a real one waits
// for a disk.
type fakeLUNs struct {
	begun, goOn chan struct{}

	mu     sync.Mutex
	owner  map[uint16]string // guarded by mu; all other LUNs belong to "a"
	guest  map[uint16]string // guarded by mu
	broken error             // guarded by mu; the error of storage
	once   bool              // guarded by mu; storage fails only once
	absent bool              // guarded by mu; the second initiator is not logged in
	opened []serving.Opening // guarded by mu; the arguments of Admit
}

func newFakeLUNs() *fakeLUNs {
	return &fakeLUNs{
		begun: make(chan struct{}, 8), goOn: make(chan struct{}),
		owner: map[uint16]string{}, guest: map[uint16]string{},
	}
}

func (f *fakeLUNs) Admit(lun uint16, initiator string, until time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.owner[lun] == initiator {
		return errors.New("it belongs to that one")
	}
	f.guest[lun] = initiator
	f.opened = append(f.opened, serving.Opening{LUN: lun, To: initiator, Until: until})
	return nil
}

func (f *fakeLUNs) Openings() []serving.Opening {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.opened
}

func (f *fakeLUNs) Holders(lun uint16) serving.Holders {
	f.mu.Lock()
	defer f.mu.Unlock()
	return serving.Holders{Owner: f.owner[lun], Guest: f.guest[lun]}
}

func (f *fakeLUNs) HandOver(lun uint16) (former string, err error) {
	if lun == 1 {
		f.begun <- struct{}{}
		<-f.goOn
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch err := f.broken; {
	case f.absent:
		return "", serving.ErrNotLoggedIn
	case err != nil:
		if f.once {
			f.broken = nil
		}
		return "", err
	case f.guest[lun] == "":
		return "", errors.New("not handed over")
	}
	former, f.owner[lun] = f.owner[lun], f.guest[lun]
	delete(f.guest, lun)
	return former, nil
}

func (f *fakeLUNs) Withdraw(lun uint16) (guest string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken != nil {
		return "", f.broken
	}
	guest = f.guest[lun]
	delete(f.guest, lun)
	return guest, nil
}

func (f *fakeLUNs) state(lun uint16) (owner, guest string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.owner[lun], f.guest[lun]
}

const second = "iqn.2026-01.test:destination"

func openFor(lun uint16, d time.Duration) status.Handover {
	return status.Handover{Action: status.ActionOpen, LUN: lun, To: second, Seconds: d.Seconds()}
}

// TestHandoverToWhoeverCanLogIn accepts every initiator name that can log in, in upper and lower
// case.
func TestHandoverToWhoeverCanLogIn(t *testing.T) {
	c := newHandovers(newFakeLUNs(), zap.NewNop())
	for _, name := range []string{
		second, "iqn.2008-11.org.linux-kvm:My_VM", "eui.02004567A425678D",
	} {
		_, err := c.do(t.Context(), status.Handover{Action: status.ActionOpen, LUN: 2, To: name})
		require.NoError(t, err)
	}
	for _, name := range []string{
		"destination", "iqn.2026-1.test:destination", "iqn.2026-01.test:the destination",
	} {
		_, err := c.do(t.Context(), status.Handover{Action: status.ActionOpen, LUN: 2, To: name})
		require.ErrorContains(t, err, name)
	}
}

// TestHandoverForNoTime checks that a time that overflows is refused. The LUN would be open for
// ever.
func TestHandoverForNoTime(t *testing.T) {
	luns := newFakeLUNs()
	c := newHandovers(luns, zap.NewNop())
	defer c.stopTimers()
	longest := time.Duration(math.MaxInt64).Seconds()
	for _, seconds := range []float64{-1, -1e-300, 1e10, 1e300, longest} {
		req := status.Handover{Action: status.ActionOpen, LUN: 2, To: second, Seconds: seconds}
		require.ErrorContains(t, testtool.Err(c.do(t.Context(), req)), "cannot be open for")
	}
	require.Empty(t, luns.opened)
}

// TestHandoverTellsWhoIsFenced ends handovers of a LUN that nobody has used before, and of one that
// has an owner. The answer must not say that a machine is fenced if it is not.
func TestHandoverTellsWhoIsFenced(t *testing.T) {
	c := newHandovers(newFakeLUNs(), zap.NewNop())
	defer c.stopTimers()
	for _, step := range []struct{ to, told string }{
		{second, "nobody is fenced"},
		{"iqn.2026-01.test:third", "the former one, " + second + ", is fenced"},
	} {
		_, err := c.do(t.Context(), status.Handover{Action: status.ActionOpen, LUN: 2, To: step.to})
		require.NoError(t, err)
		done, err := c.do(t.Context(), status.Handover{Action: status.ActionFinish, LUN: 2})
		require.NoError(t, err)
		require.Contains(t, done, step.told)
	}
	const misspelt = "iqn.2026-01.test:destinatoin"
	_, err := c.do(t.Context(), status.Handover{Action: status.ActionOpen, LUN: 2, To: misspelt})
	require.NoError(t, err)
	done, err := c.do(t.Context(), status.Handover{Action: status.ActionCancel, LUN: 2})
	require.NoError(t, err)
	require.Contains(t, done, misspelt+" is fenced")
}

// TestHandoverExtendedAtItsEnd extends a handover at the moment when its time runs out. Either it
// goes on, or the caller learns that it has ended.
func TestHandoverExtendedAtItsEnd(t *testing.T) {
	t.Run("too late", func(t *testing.T) {
		f := newFakeLUNs()
		c := newHandovers(f, zap.NewNop())
		defer c.stopTimers()
		require.NoError(t, testtool.Err(c.do(t.Context(), openFor(1, time.Millisecond))))
		<-f.begun
		extended := testtool.Go(func() error {
			return testtool.Err(c.do(t.Context(), openFor(1, time.Hour)))
		})
		testtool.Waits(t, extended, "nobody knows yet how the handover ends")
		close(f.goOn)
		require.ErrorContains(t, <-extended, "belongs")
		owner, guest := f.state(1)
		require.Equal(t, second, owner)
		require.Empty(t, guest)
	})
	t.Run("in time", func(t *testing.T) {
		f := newFakeLUNs()
		c := newHandovers(f, zap.NewNop())
		defer c.stopTimers()
		require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
		first := c.openings[2]
		require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
		c.expire(2, first) // its timer had fired already
		owner, guest := f.state(2)
		require.Empty(t, owner)
		require.Equal(t, second, guest)

		// A timer that fires after another request ended its handover does nothing, and leaves a
		// later opening alone.
		last := c.openings[2]
		_, err := c.do(t.Context(), status.Handover{Action: status.ActionCancel, LUN: 2})
		require.NoError(t, err)
		require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, 0))))
		c.expire(2, last)
		owner, guest = f.state(2)
		require.Empty(t, owner)
		require.Equal(t, second, guest)
	})
}

// TestHandoverThatHangs uses a disk that does not end the commands of the fenced initiator. Other
// LUNs and the daemon's stop do not wait for it. A second request for the same LUN learns the
// reason, or gives up.
func TestHandoverThatHangs(t *testing.T) {
	f := newFakeLUNs()
	c := newHandovers(f, zap.NewNop())
	require.NoError(t, testtool.Err(c.do(t.Context(), openFor(1, 0))))
	finished := testtool.Go(func() error {
		return testtool.Err(c.do(t.Context(), status.Handover{Action: status.ActionFinish, LUN: 1}))
	})
	<-f.begun
	require.NoError(t, testtool.Err(c.do(t.Context(), openFor(2, time.Hour))))
	gone, leave := context.WithCancel(t.Context())
	leave()
	_, err := c.do(gone, status.Handover{Action: status.ActionCancel, LUN: 1})
	require.ErrorContains(t, err, "the disk of LUN 1 is still running commands")
	c.stopTimers()
	close(f.goOn)
	require.NoError(t, <-finished)
	owner, _ := f.state(1)
	require.Equal(t, second, owner)
}

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
