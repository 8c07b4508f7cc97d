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

// wire is a connection of the load generator. Its user has a thread of its own, so it waits in
// system calls. It sends everything that is queued in one call, reads in large pieces, and looks
// only at the headers of what it reads.
type wire struct {
	fd int

	out []byte // what will be sent next

	in   []byte
	r, w int
	skip int // bytes to drop before the next header
	low  int // a read returns when this many bytes have arrived; 0: one

	timeout time.Duration
}

const inBuffer = 512 << 10

// newWire takes a connection over; the caller closes nc. A peer that is silent for longer than
// timeout counts as hanging. Go's poller does not know the descriptor. Otherwise each packet would
// also wake a thread of the poller, and the server, as the sender, would pay for that.
func newWire(nc net.Conn, timeout time.Duration) (*wire, error) {
	raw, err := nc.(syscall.Conn).SyscallConn()
	if err != nil {
		return nil, err
	}
	w := &wire{fd: -1, in: make([]byte, inBuffer), timeout: timeout}
	var dupErr error
	if err := raw.Control(func(fd uintptr) {
		w.fd,
			dupErr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil || dupErr != nil {
		return nil, errors.Join(err, dupErr)
	}
	limit := syscall.NsecToTimeval(int64(timeout))
	err = errors.Join(syscall.SetNonblock(w.fd, false),
		syscall.SetsockoptTimeval(w.fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit),
		syscall.SetsockoptTimeval(w.fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit))
	if err != nil {
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

// receive waits until something arrives, and calls handle for each header of n bytes in it. handle
// returns how many bytes to skip before the next header.
func (w *wire) receive(n int, handle func(header []byte) (drop int, err error)) error {
	if err := w.wakeAt(min(w.skip, inBuffer/2)); err != nil {
		return err
	}
	if arrived, err := w.await(); err != nil || !arrived {
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

// wakeAt makes a read wait until n bytes have arrived, if they are known to come. The server pays
// for each wake-up of this process. The kernel's initiator is not woken for each segment, either.
func (w *wire) wakeAt(n int) error {
	if n == w.low {
		return nil
	}
	w.low = n
	return syscall.SetsockoptInt(w.fd, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, max(1, n))
}

// await waits until as many bytes have arrived as wakeAt wants. Otherwise a read would take the
// bytes that are there, and wake only when as many are there again: with the last reply, that is
// never.
func (w *wire) await() (arrived bool, err error) {
	if w.low <= 1 {
		return true, nil // the read waits
	}
	fds := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}
	switch n, err := unix.Poll(fds, int(w.timeout.Milliseconds())); {
	case err == unix.EINTR:
		return false, nil
	case err != nil:
		return false, fmt.Errorf("wait for data: %w", err)
	case n == 0:
		return false, errHung
	}
	return true, nil
}

func (w *wire) close() error { return syscall.Close(w.fd) }
