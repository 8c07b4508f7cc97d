package target

import (
	"errors"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// wire is what the PDUs of a connection come and go by.
type wire interface {
	// readv fills first and then next, as far as there is something to fill them with, and returns
	// the number of bytes. With wait it blocks until there is one at least; without, 0 and no error
	// say that nothing is there yet. first is not empty.
	readv(first, next []byte, wait bool) (int, error)
	// writev sends all of data.
	writev(data [][]byte) error
	// trim gives back the room that writev keeps for the next call. It does not run together with
	// writev.
	trim()
	// ended looks whether the peer has closed the connection, and nothing is left to read. It takes
	// nothing from the reader, and does not wait; any goroutine may ask.
	ended() bool
}

// plainWire is the wire of a connection that has not logged in, or is no socket.
type plainWire struct {
	net.Conn
	left net.Buffers // here, so that a write costs no allocation
}

func (w *plainWire) readv(first, _ []byte, wait bool) (int, error) {
	if !wait {
		return 0, nil
	}
	n, err := w.Read(first)
	if n == 0 && err == nil {
		err = io.ErrNoProgress
	}
	return n, err
}

func (w *plainWire) writev(data [][]byte) error {
	w.left = data
	_, err := w.left.WriteTo(w.Conn)
	return err
}

func (w *plainWire) trim() {} // there is none

func (w *plainWire) ended() (end bool) {
	sc, ok := w.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) { end = atEnd(int(fd)) })
	return end && err == nil
}

func atEnd(fd int) bool {
	var b [1]byte
	n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return n == 0 && err == nil || errors.Is(err, unix.ECONNRESET)
}
