package guestinit

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// supervisor manages a running entry point.
type supervisor struct {
	pid   int
	stop  syscall.Signal
	grace time.Duration
	say   func(format string, args ...any)

	requests <-chan struct{}  // to stop; a second one ends the time of grace
	signals  <-chan os.Signal // sent to process 1 and meant for the entry point
	kill     func(pid int, signal syscall.Signal)
}

// ending describes the end of an entry point.
type ending struct {
	status  int // as in a container runtime
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

// endingOf reads a wait status. In a separate namespace, reboot(2) makes the kernel end process 1
// by a signal: SIGHUP for a restart, SIGINT to halt or power off (pid_namespaces(7)). Nothing else
// can end it by these signals.
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

// reap waits for ended processes until pid is among them. Process 1 is the parent of every process
// that has lost its own.
func reap(pid int) unix.WaitStatus {
	for {
		var status unix.WaitStatus
		got, err := unix.Wait4(-1, &status, 0, nil)
		if got == pid && (status.Exited() || status.Signaled()) {
			return status
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return status // no child is left, which is impossible before pid was returned
		}
	}
}

// endTimeout is how long killed processes may take to end. A process that waits for a lost disk
// never does.
const endTimeout = 10 * time.Second

// endOthers kills all other processes, and waits for their end.
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
