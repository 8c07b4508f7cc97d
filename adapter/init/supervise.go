package guestinit

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// supervisor looks after a running entry point.
type supervisor struct {
	pid   int
	stop  syscall.Signal
	grace time.Duration
	say   func(format string, args ...any)

	requests <-chan struct{}  // to stop; a second one does not wait
	signals  <-chan os.Signal // that were sent to process 1 and are for the entry point
	kill     func(pid int, signal syscall.Signal)
}

// ending is how an entry point has ended.
type ending struct {
	status  int // as a container runtime says it
	restart bool
}

// run returns when the entry point has ended. exited brings its wait status.
func (s *supervisor) run(exited <-chan unix.WaitStatus, ownNamespace bool) ending {
	var overdue <-chan time.Time
	asked := false
	for {
		select {
		case status := <-exited:
			return endingOf(status, ownNamespace)
		case <-s.requests:
			if asked {
				s.say("asked to stop again: the entry point is killed")
				s.kill(s.pid, unix.SIGKILL)
				continue
			}
			asked = true
			s.say("asked to stop: %v for the entry point, which has %v", s.stop, s.grace)
			s.kill(s.pid, s.stop)
			overdue = time.After(s.grace)
		case <-overdue:
			s.say("the entry point has not ended in %v: it is killed", s.grace)
			s.kill(s.pid, unix.SIGKILL)
		case signal := <-s.signals:
			if number, ok := signal.(syscall.Signal); ok {
				s.kill(s.pid, number)
			}
		}
	}
}

// endingOf reads a wait status. In a namespace of its own, reboot(2) makes the kernel end process 1
// there by a signal: SIGHUP for a restart, SIGINT for the other ways to go (pid_namespaces(7)).
// Nothing else can end it by these.
func endingOf(status unix.WaitStatus, ownNamespace bool) ending {
	switch {
	case !status.Signaled():
		return ending{status: status.ExitStatus()}
	case ownNamespace && status.Signal() == unix.SIGHUP:
		return ending{restart: true}
	case ownNamespace && status.Signal() == unix.SIGINT:
		return ending{}
	}
	return ending{status: 128 + int(status.Signal())}
}

// reap waits for processes that have ended until it is the entry point. As process 1 we are the
// parent of every process that has lost its own.
func reap(pid int) unix.WaitStatus {
	for {
		var status unix.WaitStatus
		got, err := unix.Wait4(-1, &status, 0, nil)
		if got == pid && (status.Exited() || status.Signaled()) {
			return status
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return status // no child is left: it cannot be, as long as pid was not returned
		}
	}
}

// endTimeout is how long killed processes may take to go. One that waits for a disk that is gone
// never does.
const endTimeout = 10 * time.Second

// endOthers kills every process that is left, and waits until they are gone.
func endOthers() {
	_ = unix.Kill(-1, unix.SIGKILL) // ESRCH: there are none
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for {
			_, err := unix.Wait4(-1, nil, 0, nil)
			if err != nil && !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}()
	select {
	case <-gone:
	case <-time.After(endTimeout):
	}
}
