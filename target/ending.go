package target

import (
	"errors"
	"io"
	"net"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
)

func (c *conn) logEnd(s *session, cause error) {
	reason := endReason(cause)
	c.srv.opt.Disks.Observer.SessionEnded(serving.SessionEvent{Client: s.login.InitiatorName,
		Remote: c.remote.String(), Discovery: s.discovery(), Reason: reason})
	how := serving.Expected
	switch reason {
	case "protocol_error", "header_digest", "connection_error", "internal_error":
		how = serving.Failure
	case "connection_closed":
		how = serving.EndedSince(s.since, s.discovery() ||
			s.work.read.Load()+s.work.written.Load() > 0)
	}
	level, fields := c.srv.conns.Ended(&c.Conn, how, reason, zap.InfoLevel)
	fields = append(fields, zap.String("initiator", s.login.InitiatorName),
		zap.Uint16("tsih", s.tsih),
		zap.Bool("discovery", s.discovery()), zap.String("reason", reason),
		zap.Duration("lasted", time.Since(s.since).Round(time.Millisecond)))
	if reason != reasonLogout {
		fields = append(fields, zap.Error(cause))
	}
	c.log().Log(level, "session ended", fields...)
}

const reasonLogout = "logout"

// endReason is a short stable label for the end of a session.
func endReason(cause error) string {
	switch {
	case errors.Is(cause, errLoggedOut):
		return reasonLogout
	case errors.Is(cause, io.EOF), errors.Is(cause, io.ErrUnexpectedEOF),
		errors.Is(cause, net.ErrClosed):
		return "connection_closed"
	case errors.Is(cause, errReinstated):
		return "reinstated"
	case serving.EndOf(cause) != "":
		return serving.EndOf(cause)
	case errors.Is(cause, errPeerDead), errors.Is(cause, errPDUTimeout),
		errors.Is(cause, errWriteTimeout):
		return "timeout"
	case errors.Is(cause, errTargetReset):
		return "target_reset"
	case errors.Is(cause, errNexusReset):
		return "nexus_reset"
	case errors.Is(cause, errPanic):
		return "internal_error"
	case errors.Is(cause, errHeaderDigest):
		return "header_digest"
	case errors.As(cause, new(*fatalError)):
		return "protocol_error"
	}
	return "connection_error"
}
