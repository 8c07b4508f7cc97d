package socket

import (
	"io"
	"net"
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
