package socket

import (
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Wire carries the messages of a connection.
type Wire interface {
	// Readv reads available data into first and then next and returns the number of bytes. With
	// wait it blocks until there is at least one byte. Without wait, 0 and no error mean that there
	// is no data yet. first is not empty.
	Readv(first, next []byte, wait bool) (int, error)
	// Writev sends all of data.
	Writev(data [][]byte) error
	// Trim gives back memory that Writev keeps for the next call. It must not run together with
	// Writev.
	Trim()
	// Ended reports whether the peer has closed the connection, also if data before the end is not
	// read yet. It takes no data from the reader and does not wait. Any goroutine may call it.
	Ended() bool
}

// Plain is the Wire of a connection of any kind.
type Plain struct {
	net.Conn
	left net.Buffers // here, so that a write allocates nothing
}

// Readv implements Wire.
func (w *Plain) Readv(first, _ []byte, wait bool) (int, error) {
	if !wait {
		return 0, nil
	}
	n, err := w.Read(first)
	if n == 0 && err == nil {
		err = io.ErrNoProgress
	}
	return n, err
}

// Writev implements Wire.
func (w *Plain) Writev(data [][]byte) error {
	w.left = data
	_, err := w.left.WriteTo(w.Conn)
	return err
}

// Trim implements Wire.
func (w *Plain) Trim() {} // it keeps none

// Ended implements Wire.
func (w *Plain) Ended() (end bool) {
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

// atEnd reports a peer's end of the stream behind what is not read yet, too.
func atEnd(fd int) bool {
	at := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(at, 0)
	return n > 0 && err == nil
}
