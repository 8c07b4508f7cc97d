package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// wire is a connection of the load generator. It waits in the system calls themselves, as its user
// has a thread of its own: what is to be said goes out in one call, and what comes in is read in
// large pieces and not looked at beyond the headers.
type wire struct {
	fd int

	out []byte // what will be sent next

	in   []byte
	r, w int
	skip int // bytes to drop before the next header
	low  int // how many bytes must be there for a read to return; 0: one
}

const inBuffer = 512 << 10

// newWire takes a connection over; the caller closes nc. A peer that is silent for longer than
// patience hangs. The descriptor is a bare one, of which Go's poller does not know: each arrival
// would wake a thread of the poller as well, which the server, as the sender, pays for.
func newWire(nc net.Conn, patience time.Duration) (*wire, error) {
	raw, err := nc.(syscall.Conn).SyscallConn()
	if err != nil {
		return nil, err
	}
	w := &wire{fd: -1, in: make([]byte, inBuffer)}
	var dupErr error
	if err := raw.Control(func(fd uintptr) {
		w.fd,
			dupErr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil || dupErr != nil {
		return nil, errors.Join(err, dupErr)
	}
	limit := syscall.NsecToTimeval(int64(patience))
	if err := errors.Join(syscall.SetNonblock(w.fd, false),
		syscall.SetsockoptTimeval(w.fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit),
		syscall.SetsockoptTimeval(w.fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit)); err !=
		nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (w *wire) flush() error {
	err := w.write(w.out)
	w.out = w.out[:0]
	return err
}

func (w *wire) write(b []byte) error {
	for len(b) > 0 {
		n, err := syscall.Write(w.fd, b)
		switch err {
		case nil:
			b = b[n:]
		case syscall.EINTR:
		case syscall.EAGAIN:
			return errHung
		default:
			return fmt.Errorf("send: %w", err)
		}
	}
	return nil
}

// receive waits for something to arrive, and hands on all headers of n bytes in it. handle returns
// how many bytes to drop before the next.
func (w *wire) receive(n int, handle func(header []byte) (drop int, err error)) error {
	if err := w.wakeAt(min(w.skip, inBuffer/2)); err != nil {
		return err
	}
	got, err := syscall.Read(w.fd, w.in[w.w:])
	switch {
	case err == syscall.EINTR:
		return nil
	case err == syscall.EAGAIN:
		return errHung
	case err != nil:
		return fmt.Errorf("receive: %w", err)
	case got == 0:
		return io.ErrUnexpectedEOF
	}
	w.w += got
	for {
		drop := min(w.skip, w.w-w.r)
		w.skip -= drop
		w.r += drop
		if w.skip > 0 || w.w-w.r < n {
			break
		}
		h := w.in[w.r : w.r+n]
		w.r += n
		if w.skip, err = handle(h); err != nil {
			return err
		}
	}
	w.w = copy(w.in, w.in[w.r:w.w])
	w.r = 0
	return nil
}

// wakeAt has a read wait for n bytes of what is known to come, as the kernel's initiator does not
// wake anybody for each segment either: what waking costs, the server pays.
func (w *wire) wakeAt(n int) error {
	if n == w.low {
		return nil
	}
	w.low = n
	return syscall.SetsockoptInt(w.fd, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, max(1, n))
}

func (w *wire) close() error { return syscall.Close(w.fd) }
