package nbd

import (
	"context"
	"errors"
	"io"
	"os"
	"syscall"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
)

// end ends the connection. The reading goroutine calls it.
func (c *conn) end(err error) {
	if c.tx.Wire != nil {
		c.tx.Close()
		if t, ok := c.tx.Wire.(*tlsWire); ok && errors.Is(err, errDisconnected) {
			_ = t.Close() // so the client knows that nothing was cut off
		}
	}
	c.fail(err)
	err = c.Cause()
	if c.role != nil {
		c.role.Close()
		c.late.Close()
		c.rx.Release()
		c.client.Detach()
		c.share.Charge(-c.cost())
		c.share.Part()
	}
	c.srv.conns.Drop(c)
	if c.enlisted {
		go c.srv.delist(c)
	}
	reason, expected := endOf(err)
	how := serving.Failure
	switch {
	case reason == "connection_closed" && c.disk != nil:
		how = serving.EndedSince(c.since, c.bytesRead.Load()+c.bytesWritten.Load() > 0)
	case expected:
		how = serving.Expected
	}
	level, more := c.srv.conns.Ended(&c.Conn, how, reason, zap.DebugLevel)
	c.log().Log(level, "NBD connection ended",
		append(more, zap.String("reason", reason), zap.Error(err))...)
	switch {
	case c.accepted:
		c.srv.disks.Observer.SessionEnded(serving.SessionEvent{Client: c.name,
			Remote: c.Remote(), Reason: reason})
	case !expected:
		c.srv.disks.Observer.LoginRefused(serving.LoginEvent{Client: c.name, Remote: c.Remote(),
			Reason: "nbd_" + reason, Err: err})
	}
}

// endOf returns the reason of a connection's end for metrics, and whether the client or an operator
// wanted the end.
func endOf(err error) (reason string, expected bool) {
	switch {
	case errors.Is(err, errOptionAbort) || errors.Is(err, errDisconnected):
		return "logout", true
	case serving.EndOf(err) != "":
		return serving.EndOf(err), true
	case errors.Is(err, serving.ErrTakenOver):
		return "reinstated", true
	case errors.Is(err, errSuperseded):
		return "over", true
	case errors.Is(err, errChanged) || errors.Is(err, errAnother):
		return "access_changed", true
	case errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, context.Canceled) || errors.Is(err, syscall.ECONNRESET) ||
		errors.Is(err, syscall.ETIMEDOUT):
		return "connection_closed", true
	}
	return "protocol_error", false
}
