package target

import (
	"container/list"
	"errors"
	"net"
	"net/netip"

	"go.uber.org/zap"
)

// Connections that have not logged in cost little, and their number is limited. At the limit a new
// one is not refused but pushes another one out, so that a flood of them keeps nobody from logging
// in. The victim comes from the address with the most such connections: the oldest one that has
// sent nothing useful, or else the oldest one.

// errPushedOut ends a connection that makes room for a newer one.
var errPushedOut = errors.New("too many connections that have not logged in")

// sourceOf returns the origin of a connection: an IPv4 address, or the 64-bit network of an IPv6
// address, because one host may have all addresses in it. The zero value means no address.
func sourceOf(nc net.Conn) netip.Addr {
	a, ok := nc.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	addr := a.AddrPort().Addr().Unmap().WithZone("")
	if addr.Is6() {
		if network, err := addr.Prefix(64); err == nil {
			return network.Addr()
		}
	}
	return addr
}

// hostOf returns an address without its port.
func hostOf(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().String()
	}
	return a.String()
}

// pendingConns are the connections that have not logged in. Guarded by Server.mu.
type pendingConns struct {
	order list.List // of *conn, oldest first
	from  map[netip.Addr]int
}

func (p *pendingConns) add(c *conn) {
	c.pending = p.order.PushBack(c)
	p.from[c.source]++
}

// remove forgets c. It may be called more than once.
func (p *pendingConns) remove(c *conn) {
	if c.pending == nil {
		return
	}
	p.order.Remove(c.pending)
	c.pending = nil
	if p.from[c.source]--; p.from[c.source] == 0 {
		delete(p.from, c.source)
	}
}

// takeVictim removes and returns the connection that must make room, or nil if there is none.
func (p *pendingConns) takeVictim() *conn {
	var victim *conn
	most := 0
	for e := p.order.Front(); e != nil; e = e.Next() {
		c := e.Value.(*conn)
		rank := 2 * p.from[c.source]
		if !c.began.Load() {
			rank++
		}
		if rank > most {
			victim, most = c, rank
		}
	}
	if victim != nil {
		p.remove(victim)
	}
	return victim
}

// pushOut ends a connection that must make room. It may be nil. The caller does not hold Server.mu.
func (s *Server) pushOut(victim *conn) {
	if victim != nil {
		s.pushedOut.Add(1)
		victim.fail(errPushedOut)
	}
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

// acceptor is the server as one that accepts connections.
type acceptor struct{ *Server }

// Accepted implements socket.Acceptor.
func (a acceptor) Accepted(nc net.Conn) { a.accept(nc) }

// AcceptFailed implements socket.Acceptor.
func (a acceptor) AcceptFailed(l net.Listener, err error) {
	a.log.Warn("cannot accept a connection, trying again",
		zap.String("portal", l.Addr().String()), zap.Error(err))
}

// MakeRoom implements socket.Acceptor.
func (a acceptor) MakeRoom() bool {
	a.mu.Lock()
	victim := a.pending.takeVictim()
	a.mu.Unlock()
	a.pushOut(victim)
	return victim != nil
}

// Closing implements socket.Acceptor.
func (a acceptor) Closing() bool { return a.isClosing() }
