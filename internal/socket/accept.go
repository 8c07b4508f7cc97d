package socket

import (
	"context"
	"errors"
	"net"
	"syscall"
	"time"
)

// Acceptor is a server that accepts connections.
type Acceptor interface {
	// Accepted serves a new connection.
	Accepted(net.Conn)
	// AcceptFailed is called after the first of several failures in a row that will pass, for the
	// log.
	AcceptFailed(net.Listener, error)
	// MakeRoom closes a connection that has not introduced itself, and reports whether there was
	// one.
	MakeRoom() bool
	// Closing reports whether the server is shut down.
	Closing() bool
}

// Accept accepts connections until the server is shut down or ctx ends, and then returns nil. If
// there is no descriptor left, a connection that has not introduced itself gives up its own, and
// new ones stay in the backlog meanwhile. An error that will not pass is returned.
func Accept(ctx context.Context, l net.Listener, s Acceptor) error {
	for failed := 0; ; failed++ {
		nc, err := l.Accept()
		if err == nil {
			failed = -1
			s.Accepted(nc)
			continue
		}
		if ctx.Err() != nil || s.Closing() {
			return nil
		}
		if !passing(err) {
			return err
		}
		if failed == 0 {
			s.AcceptFailed(l, err)
		}
		pause := acceptPauses[min(failed, len(acceptPauses)-1)]
		if s.MakeRoom() {
			pause = acceptPauses[0]
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// acceptPauses are the waits after one, two and more failures in a row.
var acceptPauses = [...]time.Duration{5 * time.Millisecond, 20 * time.Millisecond,
	100 * time.Millisecond, 500 * time.Millisecond}

// passing reports whether an error of accept will pass: there are no descriptors or no memory, or
// the connection was gone before it was accepted (accept(2)).
func passing(err error) bool {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		var temporary interface{ Temporary() bool }
		return errors.As(err, &temporary) && temporary.Temporary()
	}
	switch errno {
	case syscall.EBADF, syscall.EINVAL, syscall.ENOTSOCK, syscall.EOPNOTSUPP, syscall.EFAULT:
		return false
	}
	return true
}
