package target

import (
	"errors"
	"net"

	"go.uber.org/zap"
)

// errPushedOut ends a connection that makes room for a newer one.
var errPushedOut = errors.New("too many connections that have not logged in")

// hostOf returns an address without its port.
func hostOf(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().String()
	}
	return a.String()
}

// pushOut ends a connection that must make room: see serving.Entrance.
func (c *conn) pushOut() {
	c.srv.pushedOut.Add(1)
	c.fail(errPushedOut)
}

// logPushedOut writes one line to the log for all connections that were pushed out since the last
// one.
func (s *Server) logPushedOut() {
	if n := s.pushedOut.Swap(0); n > 0 {
		s.log.Warn("connections that had not logged in were closed to make room for new ones",
			zap.Int64("count", n),
			zap.Int("limit", s.opt.Limits.MaxPendingLogins))
	}
}
