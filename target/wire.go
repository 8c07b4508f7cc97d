package target

import (
	"errors"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// wire carries the PDUs of a connection.
type wire interface {
	// readv reads available data into first and then next and returns the number of bytes. With
	// wait it blocks until there is at least one byte. Without wait, 0 and no error mean that there
	// is no data yet. first is not empty.
	readv(first, next []byte, wait bool) (int, error)
	// writev sends all of data.
	writev(data [][]byte) error
	// trim gives back memory that writev keeps for the next call. It must not run together with
	// writev.
	trim()
	// ended reports whether the peer has closed the connection and nothing is left to read. It
	// takes no data from the reader and does not wait. Any goroutine may call it.
	ended() bool
}

// plainWire is the wire of a connection that has not logged in or has no socket.
type plainWire struct {
	net.Conn
	left net.Buffers // here, so that a write allocates nothing
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

func (w *plainWire) trim() {} // it keeps none

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
