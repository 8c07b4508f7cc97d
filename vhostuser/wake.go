package vhostuser

import (
	"sync/atomic"

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
