package main

import (
	"context"
	"errors"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/target"
)

// fakeLUNs are LUNs that "a" owns. Each handover of LUN 1 waits for a word of the test, as one does for the disk or for storage.
type fakeLUNs struct {
	begun, goOn chan struct{}

	mu     sync.Mutex
	owner  map[uint16]string // guarded by mu; the others are those of "a"
	guest  map[uint16]string // guarded by mu
	broken error             // guarded by mu; what storage answers
	once   bool              // guarded by mu; storage works again after it has answered so
	absent bool              // guarded by mu; the second initiator is not logged in
	opened []target.Opening  // guarded by mu; what Admit was asked for
}

func newFakeLUNs() *fakeLUNs {
	return &fakeLUNs{begun: make(chan struct{}, 8), goOn: make(chan struct{}), owner: map[uint16]string{}, guest: map[uint16]string{}}
}

func (f *fakeLUNs) Admit(lun uint16, initiator string, until time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.owner[lun] == initiator {
		return errors.New("it belongs to that one")
	}
	f.guest[lun] = initiator
	f.opened = append(f.opened, target.Opening{LUN: lun, To: initiator, Until: until})
	return nil
}

func (f *fakeLUNs) Openings() []target.Opening {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.opened
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
		return "", target.ErrNotLoggedIn
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

func openFor(lun uint16, d time.Duration) handoverRequest {
	return handoverRequest{Action: "open", LUN: lun, To: second, Seconds: d.Seconds()}
}

// TestHandoverToWhoeverCanLogIn: an initiator is named as its machine or VM is, and by a person in the letters that he likes.
func TestHandoverToWhoeverCanLogIn(t *testing.T) {
	c := newControl(newFakeLUNs(), zap.NewNop())
	for _, name := range []string{second, "iqn.2008-11.org.linux-kvm:My_VM", "eui.02004567A425678D"} {
		_, err := c.do(t.Context(), handoverRequest{Action: "open", LUN: 2, To: name})
		require.NoError(t, err)
	}
	for _, name := range []string{"destination", "iqn.2026-1.test:destination", "iqn.2026-01.test:the destination"} {
		_, err := c.do(t.Context(), handoverRequest{Action: "open", LUN: 2, To: name})
		require.ErrorContains(t, err, name)
	}
}

// TestHandoverForNoTime: a time that cannot be counted is refused, as the LUN would be open for ever.
func TestHandoverForNoTime(t *testing.T) {
	luns := newFakeLUNs()
	c := newControl(luns, zap.NewNop())
	defer c.stopTimers()
	for _, seconds := range []float64{-1, -1e-300, 1e10, 1e300, time.Duration(math.MaxInt64).Seconds()} {
		_, err := c.do(t.Context(), handoverRequest{Action: "open", LUN: 2, To: second, Seconds: seconds})
		require.ErrorContains(t, err, "cannot be open for")
	}
	require.Empty(t, luns.opened)
}

// TestHandoverTellsWhoIsFenced ends handovers of a LUN that nobody has used before, and of one that has an owner: a person must not
// believe that a machine is fenced that is not.
func TestHandoverTellsWhoIsFenced(t *testing.T) {
	c := newControl(newFakeLUNs(), zap.NewNop())
	defer c.stopTimers()
	for _, step := range []struct{ to, told string }{
		{second, "nobody is fenced"},
		{"iqn.2026-01.test:third", "the former one, " + second + ", is fenced"},
	} {
		_, err := c.do(t.Context(), handoverRequest{Action: "open", LUN: 2, To: step.to})
		require.NoError(t, err)
		done, err := c.do(t.Context(), handoverRequest{Action: "finish", LUN: 2})
		require.NoError(t, err)
		require.Contains(t, done, step.told)
	}
	const misspelt = "iqn.2026-01.test:destinatoin"
	_, err := c.do(t.Context(), handoverRequest{Action: "open", LUN: 2, To: misspelt})
	require.NoError(t, err)
	done, err := c.do(t.Context(), handoverRequest{Action: "cancel", LUN: 2})
	require.NoError(t, err)
	require.Contains(t, done, misspelt+" is fenced")
}

// TestHandoverExtendedAtItsEnd extends the time of a handover in the moment in which it runs out: either it goes on, or the one who
// asked learns that it has ended.
func TestHandoverExtendedAtItsEnd(t *testing.T) {
	t.Run("too late", func(t *testing.T) {
		f := newFakeLUNs()
		c := newControl(f, zap.NewNop())
		defer c.stopTimers()
		_, err := c.do(t.Context(), openFor(1, time.Millisecond))
		require.NoError(t, err)
		<-f.begun
		extended := make(chan error, 1)
		go func() {
			_, err := c.do(t.Context(), openFor(1, time.Hour))
			extended <- err
		}()
		select {
		case err := <-extended:
			require.Error(t, err, "nobody knows yet how the handover ends")
		case <-time.After(100 * time.Millisecond):
		}
		close(f.goOn)
		require.ErrorContains(t, <-extended, "belongs")
		owner, guest := f.state(1)
		require.Equal(t, second, owner)
		require.Empty(t, guest)
	})
	t.Run("in time", func(t *testing.T) {
		f := newFakeLUNs()
		c := newControl(f, zap.NewNop())
		defer c.stopTimers()
		_, err := c.do(t.Context(), openFor(2, time.Hour))
		require.NoError(t, err)
		first := c.openings[2]
		_, err = c.do(t.Context(), openFor(2, time.Hour))
		require.NoError(t, err)
		c.expire(2, first) // its timer had fired already
		owner, guest := f.state(2)
		require.Empty(t, owner)
		require.Equal(t, second, guest)

		// What another request has ended does not run out either, nor does it end what was opened since.
		last := c.openings[2]
		_, err = c.do(t.Context(), handoverRequest{Action: "cancel", LUN: 2})
		require.NoError(t, err)
		_, err = c.do(t.Context(), openFor(2, 0))
		require.NoError(t, err)
		c.expire(2, last)
		owner, guest = f.state(2)
		require.Empty(t, owner)
		require.Equal(t, second, guest)
	})
}

// TestHandoverThatHangs has a disk that does not end the commands of the fenced initiator: other LUNs and the end of the daemon do not
// wait for it, and who asks for the same LUN learns what he waits for, or goes away.
func TestHandoverThatHangs(t *testing.T) {
	f := newFakeLUNs()
	c := newControl(f, zap.NewNop())
	_, err := c.do(t.Context(), openFor(1, 0))
	require.NoError(t, err)
	finished := make(chan error, 1)
	go func() {
		_, err := c.do(t.Context(), handoverRequest{Action: "finish", LUN: 1})
		finished <- err
	}()
	<-f.begun
	_, err = c.do(t.Context(), openFor(2, time.Hour))
	require.NoError(t, err)
	gone, leave := context.WithCancel(t.Context())
	leave()
	_, err = c.do(gone, handoverRequest{Action: "cancel", LUN: 1})
	require.ErrorContains(t, err, "the handover of LUN 1 is ending")
	c.stopTimers()
	close(f.goOn)
	require.NoError(t, <-finished)
	owner, _ := f.state(1)
	require.Equal(t, second, owner)
}

// TestHandoverThatCannotRunOut: the log has one line about it, which does not say that it is over, and no time begins any more once the daemon stops.
func TestHandoverThatCannotRunOut(t *testing.T) {
	luns := newFakeLUNs()
	core, log := observer.New(zap.InfoLevel)
	c := newControl(luns, zap.New(core))
	_, err := c.do(t.Context(), openFor(2, time.Hour))
	require.NoError(t, err)
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

// TestHandoverWithoutAnAnswer asks a daemon that is there and waits for its disk.
func TestHandoverWithoutAnAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := listenUnix(path)
	require.NoError(t, err)
	defer l.Close()
	ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	err = handoverPending(3).ask(ctx, path, http.MethodPost, pathHandover, handoverRequest{}, nil)
	require.ErrorContains(t, err, "goes on with what was asked")
	require.ErrorContains(t, err, "LUN 3")
	require.NotContains(t, err.Error(), "no daemon answers")
}

func TestHandoverOfAnotherContainersDaemon(t *testing.T) {
	require.NoError(t, checkDaemon("s", &unix.Ucred{Pid: 1}, true), "its own")
	require.NoError(t, checkDaemon("s", &unix.Ucred{Pid: 0}, false), "of a container without a daemon, to control one")
	require.NoError(t, checkDaemon("s", &unix.Ucred{Pid: 77}, false), "on a machine")
	require.NoError(t, checkDaemon("s", nil, true), "the kernel does not tell")
	for _, pid := range []int32{0, 77} {
		require.ErrorContains(t, checkDaemon("/work/control.sock", &unix.Ucred{Pid: pid}, true), "\"/work/control.sock\" is the socket of a daemon in another container")
	}

	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := listenUnix(path)
	require.NoError(t, err)
	defer l.Close()
	c, err := net.Dial("unix", path)
	require.NoError(t, err)
	defer c.Close()
	require.EqualValues(t, os.Getpid(), peerOf(c).Pid, "who listens, seen from who asks")
}

// TestHandoverRunsOutOnBrokenStorage has a time run out that cannot be ended, as storage fails: the log says that the LUN is open to both,
// and it is ended when storage works again.
func TestHandoverRunsOutOnBrokenStorage(t *testing.T) {
	f := newFakeLUNs()
	f.broken = errors.New("no space left")
	core, log := observer.New(zap.WarnLevel)
	c := newControl(f, zap.New(core))
	defer c.stopTimers()
	_, err := c.do(t.Context(), openFor(2, time.Hour))
	require.NoError(t, err)
	for i, absent := range []bool{false, true} {
		f.absent = absent
		c.expire(2, c.openings[2])
		require.Len(t, log.FilterMessageSnippet("open to both").FilterField(zap.Error(f.broken)).All(), i+1)
		require.Contains(t, c.openings, uint16(2), "it is tried again")
	}
	f.broken, f.absent = nil, false
	c.expire(2, c.openings[2])
	owner, guest := f.state(2)
	require.Equal(t, second, owner)
	require.Empty(t, guest)
}

// TestHandoverRunsOutWithoutTheSecond has a time run out when the second machine is not there: the guest is where it was.
func TestHandoverRunsOutWithoutTheSecond(t *testing.T) {
	f := newFakeLUNs()
	f.absent = true
	core, log := observer.New(zap.InfoLevel)
	c := newControl(f, zap.New(core))
	_, err := c.do(t.Context(), openFor(2, time.Hour))
	require.NoError(t, err)
	c.expire(2, c.openings[2])
	require.Equal(t, second, log.All()[0].ContextMap()["fenced"])
	owner, guest := f.state(2)
	require.Empty(t, owner)
	require.Empty(t, guest)
	require.Empty(t, c.openings)
}

// TestHandoverRunsOutOnWeakStorage has storage fail for a moment only: the second machine, which the guest runs on, is not fenced for that.
func TestHandoverRunsOutOnWeakStorage(t *testing.T) {
	f := newFakeLUNs()
	f.broken, f.once = errors.New("no space left"), true
	c := newControl(f, zap.NewNop())
	defer c.stopTimers()
	_, err := c.do(t.Context(), openFor(2, time.Hour))
	require.NoError(t, err)
	c.expire(2, c.openings[2])
	_, guest := f.state(2)
	require.Equal(t, second, guest)
	c.expire(2, c.openings[2])
	owner, _ := f.state(2)
	require.Equal(t, second, owner)
}

// TestHandoverResumed restarts the daemon while LUNs are open: the time goes on, and is long enough that both machines can log in again.
func TestHandoverResumed(t *testing.T) {
	f := newFakeLUNs()
	c := newControl(f, zap.NewNop())
	for lun, open := range map[uint16]time.Duration{2: time.Hour, 3: time.Nanosecond, 4: 0} {
		req := openFor(lun, 0)
		req.Seconds = open.Seconds()
		_, err := c.do(t.Context(), req)
		require.NoError(t, err)
	}
	c.stopTimers()

	core, log := observer.New(zap.InfoLevel)
	again := newControl(f, zap.New(core))
	defer again.stopTimers()
	again.resume()
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
