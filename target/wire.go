package target

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// wire is the receiving side of a connection. A socket is read by system calls of its own, as net.Conn can neither try without
// waiting nor fill two places at once; anything else is read by net.Conn. It belongs to the goroutine that reads.
type wire struct {
	nc     net.Conn
	socket syscall.RawConn // nil: nc is no socket; not changed after init

	// The call in progress, which the callbacks below see. They are made once, so that a read costs no allocation.
	places    [2][]byte
	n         int
	err       error
	try, wait func(fd uintptr) bool
}

func (w *wire) init(nc net.Conn) {
	w.nc = nc
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			w.socket = raw
		}
	}
	w.unpace()
	w.try = func(fd uintptr) bool { w.readv(fd); return true }
	w.wait = func(fd uintptr) bool { return w.readv(fd) }
}

// unpace takes a connection within this host from a congestion control that paces what is sent, which the host's default may be (BBR):
// nothing is congested there, and its timers and retransmissions made large reads a fifth dearer. Reno is what every process may choose.
// A kernel that refuses leaves a connection that works as before.
func (w *wire) unpace() {
	if w.socket == nil || !withinHost(w.nc.LocalAddr(), w.nc.RemoteAddr()) {
		return
	}
	_ = w.socket.Control(func(fd uintptr) {
		_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
	})
}

// withinHost says that both ends of a connection are on this host, as where the virtual machine is in the same pod.
func withinHost(local, remote net.Addr) bool {
	l, lok := local.(*net.TCPAddr)
	r, rok := remote.(*net.TCPAddr)
	return lok && rok && (r.IP.IsLoopback() || r.IP.Equal(l.IP))
}

// read fills first and then next, as far as there is something to fill them with, and returns the number of bytes. With wait it
// blocks until there is one at least; without, 0 and no error say that nothing is there yet. first is not empty.
func (w *wire) read(first, next []byte, wait bool) (int, error) {
	if w.socket == nil {
		if !wait {
			return 0, nil
		}
		n, err := w.nc.Read(first)
		if n == 0 && err == nil {
			err = io.ErrNoProgress
		}
		return n, err
	}
	w.places, w.n, w.err = [2][]byte{first, next}, 0, nil
	how := w.try
	if wait {
		how = w.wait
	}
	err := w.socket.Read(how)
	w.places = [2][]byte{}
	if err == nil {
		err = w.err
	}
	return w.n, err
}

// readv is one attempt. It says whether the call is over.
func (w *wire) readv(fd uintptr) (done bool) {
	for {
		var n int
		var err error
		if len(w.places[1]) == 0 {
			n, err = unix.Read(int(fd), w.places[0])
		} else {
			n, err = unix.Readv(int(fd), w.places[:])
		}
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return false
		case err != nil:
			w.err = os.NewSyscallError("read", err)
		case n == 0:
			w.err = io.EOF
		default:
			w.n = n
		}
		return true
	}
}
