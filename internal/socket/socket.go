package socket

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket is the TCP connection of a session, unknown to Go's poller. Data that arrives at one of
// Go's own sockets wakes a thread, even while the reader is busy and would find the data by itself;
// with a peer that sends without pause, this took a sixth of the target's time. So a Socket has its
// own epoll instances. Go's poller watches these, and they are silent unless a goroutine waits.
//
// One goroutine at a time may read, and one may write. Any goroutine may close.
type Socket struct {
	local, remote net.Addr
	in, out       readiness

	mu sync.RWMutex // read-locked during a system call on fd
	fd int          // guarded by mu; -1: closed

	// The reader's current call.
	places  [2][]byte
	n       int
	rerr    error
	polling polling
	over    atomic.Bool // the deadline for reading had passed when it was set

	// The writer's current call.
	iov  []unix.Iovec
	left []unix.Iovec // the part of iov that is not written yet
	werr error
	// beforeWait is called once before the writer waits; nil: no call
	beforeWait func()
}

// maxIovec is the most buffers for one system call (IOV_MAX of Linux).
const maxIovec = 1024

// maxKeptIov is the longest list of buffers whose memory a Socket keeps for the next call.
const maxKeptIov = 768

// errScarce says why a connection does not get a Socket.
var errScarce = errors.New("half of the descriptors that this process may have are in use " +
	"(ulimit -n)")

// New makes a Socket of a TCP connection or of one over a Unix socket. pollers is shared with other
// readers. Nobody else may use the connection meanwhile, and the caller must close it separately.
// New fails for any other type, also for one that contains such a connection, as TLS does, and if
// descriptors are scarce.
func New(nc net.Conn, pollers *PollLimit) (*Socket, error) {
	var raw syscall.RawConn
	var err error
	switch nc := nc.(type) {
	case *net.TCPConn:
		raw, err = nc.SyscallConn()
	case *net.UnixConn:
		raw, err = nc.SyscallConn()
	default:
		return nil, errors.ErrUnsupported
	}
	if err != nil {
		return nil, err
	}
	s := &Socket{local: nc.LocalAddr(), remote: nc.RemoteAddr(), fd: -1}
	if cerr := raw.Control(func(fd uintptr) {
		s.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	if scarce(s.fd) {
		_ = s.Close()
		return nil, errScarce
	}
	s.polling = newPolling(pollers)
	if err = s.in.open(s, unix.EPOLLIN, s.readOnce); err == nil {
		err = s.out.open(s, unix.EPOLLOUT, s.writeOnce)
	}
	if err != nil {
		_ = s.Close()
		return nil, err
	}
	if withinHost(s.local, s.remote) {
		unpace(s.fd)
	}
	if _, ok := nc.(*net.UnixConn); ok {
		widen(s.fd)
	}
	return s, nil
}

// unixBuffer is how many bytes of replies a Unix socket may hold. The kernel doubles it for its own
// overhead, and limits it to twice net.core.wmem_max.
const unixBuffer = 256 << 10

// widen lets a Unix socket hold a reply with 256 KiB of data. The kernel's default holds a bit
// less, so the sender would be woken for the rest of each such reply.
func widen(fd int) { _ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, unixBuffer) }

// scarce reports whether half of the descriptors of this process are in use. fd tells, because a
// new descriptor gets the lowest free number. A session works with one descriptor, too; the other
// half is for more sessions and for disks.
func scarce(fd int) bool {
	var limit unix.Rlimit
	return unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil && uint64(fd) >= limit.Cur/2
}

// unpace sets congestion control to Reno for a connection within this host. The host's default may
// be one that paces, such as BBR. There is no congestion within a host, and pacing's timers and
// retransmissions made large reads a fifth more expensive. Every process may choose Reno. If the
// kernel refuses, the connection works as before.
func unpace(fd int) { _ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno") }

// withinHost reports whether both ends of a connection are on this host, for example because the
// virtual machine is in the same pod.
func withinHost(local, remote net.Addr) bool {
	l, lok := local.(*net.TCPAddr)
	r, rok := remote.(*net.TCPAddr)
	return lok && rok && (r.IP.IsLoopback() || r.IP.Equal(l.IP))
}

func (s *Socket) LocalAddr() net.Addr  { return s.local }
func (s *Socket) RemoteAddr() net.Addr { return s.remote }

// SetReadDeadline implements net.Conn. After a deadline that has passed, nothing more is read, even
// if the peer sends fast.
func (s *Socket) SetReadDeadline(t time.Time) error {
	s.over.Store(!t.IsZero() && !time.Now().Before(t))
	return s.in.epoll.SetReadDeadline(t)
}

func (s *Socket) SetWriteDeadline(t time.Time) error { return s.out.epoll.SetReadDeadline(t) }

func (s *Socket) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

func (s *Socket) Read(p []byte) (int, error) { return s.Readv(p, nil, true) }

func (s *Socket) Write(p []byte) (int, error) {
	if err := s.Writev([][]byte{p}); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close ends the calls in progress.
func (s *Socket) Close() error {
	s.mu.Lock()
	fd := s.fd
	s.fd = -1
	s.mu.Unlock()
	if fd < 0 {
		return net.ErrClosed
	}
	s.in.close()
	s.out.close()
	return os.NewSyscallError("close", unix.Close(fd))
}

func (s *Socket) closed() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.fd < 0
}

// CloseWrite tells the peer that nothing more follows.
func (s *Socket) CloseWrite() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	return os.NewSyscallError("shutdown", unix.Shutdown(s.fd, unix.SHUT_WR))
}

// Readv implements Wire.
func (s *Socket) Readv(first, next []byte, wait bool) (int, error) {
	s.places, s.n, s.rerr = [2][]byte{first, next}, 0, nil
	waited, err := false, error(nil)
	if wait {
		waited, err = s.await()
	} else if !s.over.Load() {
		s.readOnce()
	}
	s.places = [2][]byte{}
	if err == nil {
		err = s.rerr
	}
	if s.n > 0 && !waited {
		// The peer sends without waiting for us, so its data need not wake us.
		err = s.in.silence()
	}
	return s.n, err
}

// await reads as soon as there is data, and reports whether it had to wait.
func (s *Socket) await() (waited bool, err error) {
	if !s.over.Load() && s.polling.due() {
		if err := s.in.silence(); err != nil || s.polling.look(s.in.try) {
			return false, err
		}
	}
	return s.in.wait()
}

// readOnce tries to read once. It reports whether the call is done.
func (s *Socket) readOnce() (done bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.fd < 0 {
		s.rerr = net.ErrClosed
		return true
	}
	for {
		var err error
		if len(s.places[1]) == 0 {
			s.n, err = unix.Read(s.fd, s.places[0])
		} else {
			s.n, err = unix.Readv(s.fd, s.places[:])
		}
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			s.n = 0
			return false
		case err != nil:
			s.n, s.rerr = 0, os.NewSyscallError("read", err)
		case s.n == 0:
			s.rerr = io.EOF
		}
		return true
	}
}

// Writev implements Wire.
func (s *Socket) Writev(data [][]byte) error {
	iov := s.iov[:0]
	for _, b := range data {
		if len(b) > 0 {
			v := unix.Iovec{Base: unsafe.SliceData(b)}
			v.SetLen(len(b))
			iov = append(iov, v)
		}
	}
	s.iov, s.left, s.werr = iov, iov, nil
	var err error
	if !s.writeOnce() {
		if f := s.beforeWait; f != nil {
			s.beforeWait = nil
			f()
		}
		if _, err = s.out.wait(); err == nil {
			err = s.out.silence()
		}
	}
	clear(s.iov) // the buffers go back to the pool
	if s.left = nil; cap(s.iov) > maxKeptIov {
		s.iov = nil
	}
	if err == nil {
		err = s.werr
	}
	return err
}

// Trim implements Wire.
func (s *Socket) Trim() { s.iov = nil }

// writeOnce writes as much as the peer takes now. It reports whether the call is done.
func (s *Socket) writeOnce() (done bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for len(s.left) > 0 {
		if s.fd < 0 {
			s.werr = net.ErrClosed
			return true
		}
		n, _, errno := unix.Syscall(unix.SYS_WRITEV, uintptr(s.fd),
			uintptr(unsafe.Pointer(&s.left[0])), uintptr(min(len(s.left), maxIovec)))
		switch errno {
		case 0:
			s.written(uint64(n))
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			s.werr = os.NewSyscallError("writev", errno)
			return true
		}
	}
	return true
}

// written removes n bytes from the list of buffers to write.
func (s *Socket) written(n uint64) {
	for len(s.left) > 0 {
		v := &s.left[0]
		if n < v.Len {
			rest := unsafe.Slice(v.Base, v.Len)[n:]
			v.Base = unsafe.SliceData(rest)
			v.SetLen(len(rest))
			return
		}
		n -= v.Len
		s.left = s.left[1:]
	}
}

// control changes the events for which an instance wakes its waiter.
func (s *Socket) control(r *readiness, op int, events uint32) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	return os.NewSyscallError("epoll_ctl",
		unix.EpollCtl(r.fd, op, s.fd, &unix.EpollEvent{Events: events}))
}

// readiness is an epoll instance for one kind of event of one socket. Only the socket's reader or
// writer uses it.
type readiness struct {
	socket *Socket
	epoll  *os.File
	fd     int // of the epoll instance; open as long as the socket
	raw    syscall.RawConn
	events uint32
	try    func() (done bool) // one attempt of the call
	armed  bool               // the instance wakes its waiter

	// The current wait, for attempt.
	tries   int
	err     error
	attempt func(uintptr) (done bool) // made once, so that a wait allocates nothing
}

// open makes the instance, silent at first.
func (r *readiness) open(s *Socket, events uint32, try func() (done bool)) error {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	// Go's poller takes a file only with this flag.
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return os.NewSyscallError("fcntl", err)
	}
	*r = readiness{socket: s, epoll: os.NewFile(uintptr(fd), "epoll"), fd: fd, events: events,
		try: try}
	r.attempt = r.attemptOnce
	if r.raw, err = r.epoll.SyscallConn(); err != nil {
		return err
	}
	if err := r.epoll.SetReadDeadline(time.Time{}); err != nil {
		return err // Go's poller does not take it
	}
	return s.control(r, unix.EPOLL_CTL_ADD, 0)
}

// wait tries whenever the socket may be ready, until the call is done, and reports whether it had
// to wait.
func (r *readiness) wait() (waited bool, err error) {
	r.tries, r.err = 0, nil
	if err = r.raw.Read(r.attempt); err == nil {
		err = r.err
	}
	if err != nil && r.socket.closed() {
		err = net.ErrClosed // the cause; the wait saw only an error of the instance
	}
	return r.tries > 1, err
}

func (r *readiness) attemptOnce(uintptr) (done bool) {
	r.tries++
	if r.try() {
		return true
	}
	if r.armed {
		return false
	}
	// Data from before the instance was armed wakes no waiter, so look once more.
	if r.err = r.socket.control(r, unix.EPOLL_CTL_MOD, r.events); r.err != nil {
		return true
	}
	r.armed = true
	return r.try()
}

// silence keeps arriving data from waking anybody until the next wait.
func (r *readiness) silence() error {
	if !r.armed {
		return nil
	}
	r.armed = false
	return r.socket.control(r, unix.EPOLL_CTL_MOD, 0)
}

// close ends a wait.
func (r *readiness) close() {
	if r.epoll != nil {
		_ = r.epoll.Close()
	}
}
