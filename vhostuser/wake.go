package vhostuser

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// sleeper waits for the driver's kicks, or for our own wake.
type sleeper struct {
	epoll, wake int
	events      [2]unix.EpollEvent
}

// open makes a sleeper that waits for an eventfd. Each write of one end of it is an edge, so it is
// never read: a sleep costs one system call.
func (s *sleeper) open(kick int) (err error) {
	s.close()
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return err
	}
	for _, fd := range []int{kick, s.wake} {
		err := unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, fd,
			&unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *sleeper) close() {
	closeFD(s.epoll)
	closeFD(s.wake)
	s.epoll, s.wake = -1, -1
}

func (s *sleeper) sleep() {
	_, _ = unix.EpollWait(s.epoll, s.events[:], -1)
}

func (s *sleeper) wakeUp() { tell(s.wake) }

// tell adds one to an eventfd.
func tell(fd int) {
	one := [8]byte{1}
	_, _ = unix.Write(fd, one[:])
}

// caller is the eventfd that tells the driver of used requests. A write of it can wait for the
// front end, if that wants it, so nobody holds a lock meanwhile.
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

// drain lets a write go on that waits for the front end.
func (c *caller) drain() {
	if c != nil {
		var b [8]byte
		_, _ = unix.Preadv2(c.fd, [][]byte{b[:]}, -1, unix.RWF_NOWAIT)
	}
}

// lookFor is how long a queue looks at its ring after a request, before it sleeps until the driver
// kicks. To sleep and to be woken takes longer than that, and a guest that waits for one request
// before it makes the next one has it within that time.
const lookFor = 30 * time.Microsecond

// look waits for a request for a moment, without sleep. It returns whether there may be one.
func (q *queue) look() bool {
	if int(lookers.Add(1)) > max(1, int(rings.processors.Load())/2) {
		lookers.Add(-1)
		return false
	}
	defer lookers.Add(-1)
	for begun := time.Now(); time.Since(begun) < lookFor; {
		if q.waiting() || q.stop.Load() {
			return true
		}
	}
	return false
}

// maxRings is how many rings run in this process at most. Each sleeps in a thread, and Go ends a
// process that has 10,000 of them.
const maxRings = 4096

// maxExtra is how many goroutines run at once beyond those that Go has processors for. A goroutine
// that wakes in a system call goes on at once only if there is room for one more; otherwise its
// thread sleeps again, and another one is woken for it. The kernel is better at that.
const maxExtra = 16

// rings is how many rings run now.
var rings ringCount

type ringCount struct {
	mu         sync.Mutex
	n          int          // guarded by mu
	processors atomic.Int32 // as Go has found them; 0: no ring has run yet
}

// add counts rings that begin or end. It returns false if there would be too many.
func (r *ringCount) add(n int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n+n > maxRings {
		return false
	}
	if r.n == 0 {
		r.processors.Store(int32(runtime.GOMAXPROCS(0)))
	}
	r.n += n
	if want := int(r.processors.Load()) + min(r.n, maxExtra); want != runtime.GOMAXPROCS(0) {
		runtime.GOMAXPROCS(want)
	}
	return true
}

// lookers is how many queues look at their rings now. They must leave processors to the others.
var lookers atomic.Int32
