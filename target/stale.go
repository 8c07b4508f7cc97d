package target

import (
	"errors"
	"io"

	"golang.org/x/sys/unix"
)

// endStale ends the sessions of an initiator that has closed their connections already, though their readers have not come
// to see it. An initiator that logs in again after it has closed a connection then finds the claims of that one gone.
func (s *Server) endStale(initiator string) {
	for _, sess := range s.normal() {
		if sess.key.initiator == initiator && sess.conn.peerClosed() {
			sess.end(io.EOF)
		}
	}
}

// peerClosed looks whether the next thing that the connection has to read is its end. It takes nothing from the reader, and
// does not wait.
func (c *conn) peerClosed() (closed bool) {
	socket := c.rx.wire.socket
	if socket == nil {
		return false
	}
	err := socket.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		closed = n == 0 && err == nil || errors.Is(err, unix.ECONNRESET)
	})
	return closed && err == nil
}
