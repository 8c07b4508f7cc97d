package vhostuser

import (
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sleeper waits for the driver's kicks, or for a wake-up by this process.
type sleeper struct {
	epoll, wake int
	events      [2]unix.EpollEvent

	// For Go's poller. woken is called before and after the wait.
	file    *os.File // of epoll
	polled  syscall.RawConn
	woken   func(uintptr) bool
	resting bool
	yields  bool // it only lets other rings come first
}

// open makes a sleeper of a queue that waits for an eventfd. Epoll reports each write of the
// eventfd once (edge-triggered), so it is never read: a sleep costs one system call.
func (s *sleeper) open(q *queue) (err error) {
	s.close()
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return err
	}
	for _, fd := range []int{q.kick, s.wake} {
		err := unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, fd,
			&unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)})
		if err != nil {
			return err
		}
	}
	if err := unix.SetNonblock(s.epoll, true); err != nil { // Go's poller takes only such files
		return err
	}
	s.file = os.NewFile(uintptr(s.epoll), "the kicks of a ring")
	s.woken = func(uintptr) bool {
		switch {
		case s.resting:
			return true
		case s.yields:
			s.wakeUp()
		case q.stop.Load() || !q.enableKicks():
			return true
		}
		s.resting = true
		return false
	}
	s.polled, err = s.file.SyscallConn()
	return err
}

func (s *sleeper) close() {
	if s.file == nil {
		closeFD(s.epoll)
	} else {
		_ = s.file.Close()
	}
	closeFD(s.wake)
	s.epoll, s.wake, s.file = -1, -1, nil
}

func (s *sleeper) wakeUp() { tell(s.wake) }

// sleep waits until there may be something to do. It returns false without a wait if there is
// already.
//
// A thread that sleeps in a system call wakes soonest. But if there are as many awake rings as
// processors, the kernel would only switch between their threads. Then Go's poller wakes the rings
// that were kicked, and a few threads go from ring to ring.
func (q *queue) sleep() bool {
	others := rings.awake.Add(-1)
	defer rings.awake.Add(1)
	s := &q.sleeper
	if others >= rings.processors.Load() {
		s.resting = false
		if s.polled.Read(s.woken) == nil {
			return s.resting
		}
		// The poller does not take it.
	}
	if !q.enableKicks() {
		return false
	}
	_, _ = unix.EpollWait(s.epoll, s.events[:], -1)
	return true
}

// turnLength is how many requests of a ring are executed in a row while other rings wait.
const turnLength = 64

// yield lets other rings that were kicked come first. Go's scheduler would do so only after 10 ms.
func (q *queue) yield() {
	if rings.awake.Load() <= rings.processors.Load() {
		return
	}
	s := &q.sleeper
	q.tellDriver()
	s.resting, s.yields = false, true
	_ = s.polled.Read(s.woken)
	s.yields = false
}

// tell adds one to an eventfd.
func tell(fd int) {
	one := [8]byte{1}
	_, _ = unix.Write(fd, one[:])
}

// caller is the eventfd that notifies the driver of used requests. A malicious front end can make a
// write of it wait, so nobody holds a lock meanwhile.
type caller struct {
	fd   int
	refs atomic.Int32
}

func newCaller(fd int) *caller {
	c := &caller{fd: fd}
	c.refs.Store(1)
	return c
}

func (c *caller) release() {
	if c != nil && c.refs.Add(-1) == 0 {
		_ = unix.Close(c.fd)
	}
}

// drain ends the wait of a write.
func (c *caller) drain() {
	if c != nil {
		var b [8]byte
		_, _ = unix.Preadv2(c.fd, [][]byte{b[:]}, -1, unix.RWF_NOWAIT)
	}
}

// setCall replaces the eventfd that notifies the driver.
func (q *queue) setCall(call *caller) {
	q.mu.Lock()
	q.formerCalls = append(q.formerCalls, q.call)
	q.call = call
	q.mustTell = call != nil // by the reader: the write of the eventfd can wait for the front end
	q.mu.Unlock()
	q.forgetCalls()
	if q.running {
		q.sleeper.wakeUp()
	}
}

// forgetCalls closes former eventfds that are not used any more.
func (q *queue) forgetCalls() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.formerCalls = slices.DeleteFunc(q.formerCalls, func(c *caller) bool {
		gone := c == nil || c.refs.Load() == 1
		if gone {
			c.release()
		}
		return gone
	})
}

// tellDriver notifies the driver of requests that were put since the last time, if it wants that.
func (q *queue) tellDriver() {
	if call := q.toTell(); call != nil {
		tell(call.fd)
		call.release()
	}
}

// toTell returns the eventfd to notify the driver with, which the caller releases; nil: the driver
// wants no interrupt.
func (q *queue) toTell() *caller {
	q.mu.Lock()
	defer q.mu.Unlock() // the guest's memory can fault
	r := &q.ring
	if !q.mustTell && (r.usedNext == r.lastNotify || !r.mustNotify() || q.call == nil) {
		return nil
	}
	q.mustTell = false
	q.call.refs.Add(1)
	return q.call
}

// lookFor is how long a queue looks at its ring after a request, before it sleeps until the driver
// kicks. Sleeping and waking takes longer than that, and a guest that makes one request after the
// other makes the next one within that time.
const lookFor = 30 * time.Microsecond

// look looks for a request for a moment, without sleep. It returns whether there may be one. If
// more rings are awake than half of the processors, it does not look: the others need the
// processors.
func (q *queue) look() bool {
	if rings.awake.Load() > max(1, rings.processors.Load()/2) {
		return false
	}
	for begun := time.Now(); time.Since(begun) < lookFor; {
		if q.waiting() || q.stop.Load() {
			return true
		}
	}
	return false
}

// maxRings is the most running rings of this process. Each sleeps in a thread, and Go ends a
// process that has 10,000 threads.
const maxRings = 4096

var rings ringCount

type ringCount struct {
	mu         sync.Mutex
	n          int          // guarded by mu
	awake      atomic.Int32 // rings that do not sleep
	processors atomic.Int32 // of Go's runtime when a ring last began
}

// add counts rings that begin or end. It returns false if there would be too many.
func (r *ringCount) add(n int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n+n > maxRings {
		return false
	}
	r.n += n
	r.awake.Add(int32(n))
	r.processors.Store(int32(runtime.GOMAXPROCS(0)))
	return true
}
