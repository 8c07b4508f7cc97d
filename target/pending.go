package target

import (
	"container/list"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"go.uber.org/zap"
)

// Connections that have not logged in cost little, and there is a limit to their number. One more
// pushes another one out instead of being refused, so that a flood of them keeps nobody from
// logging in: of the address that has most of them, the oldest; and one that has sent nothing
// useful before one in the midst of a login.

// errPushedOut ends a connection that makes room for a newer one.
var errPushedOut = errors.New("too many connections that have not logged in")

// sourceOf is where a connection comes from: an IPv4 address, or the 64-bit network of an IPv6
// address, as a host has that many of them. The zero value is a connection without an address.
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

// hostOf is an address without its port.
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

// takeVictim removes the connection that has to make room; nil if there is none.
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

// pushOut ends a connection that has to make room; nil is none. The caller does not hold Server.mu.
func (s *Server) pushOut(victim *conn) {
	if victim != nil {
		s.pushedOut.Add(1)
		victim.fail(errPushedOut)
	}
}

// logPushedOut tells of connections that were pushed out since the last time, in one line for all
// of them.
func (s *Server) logPushedOut() {
	if n := s.pushedOut.Swap(0); n > 0 {
		s.log.Warn("connections that had not logged in were closed to make room for new ones",
			zap.Int64("count", n),
			zap.Int("limit", s.opt.Limits.MaxPendingLogins))
	}
}

// passing says that an error of accept will pass: there are no descriptors or no memory, or the
// connection was gone before it was accepted (accept(2)).
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

// acceptPauses are how long to wait after accept has failed so many times in a row.
var acceptPauses = [...]time.Duration{5 * time.Millisecond, 20 * time.Millisecond,
	100 * time.Millisecond, 500 * time.Millisecond}

// acceptFailed deals with an error of accept that will pass: what is connected goes on, new
// connections wait in the backlog, and a connection that has not logged in gives up its descriptor.
// times counts the failures in a row. It says whether to go on.
func (s *Server) acceptFailed(l net.Listener, err error, times int) bool {
	if times == 0 {
		s.log.Warn("cannot accept a connection, trying again",
			zap.String("portal", l.Addr().String()), zap.Error(err))
	}
	pause := acceptPauses[min(times, len(acceptPauses)-1)]
	s.mu.Lock()
	victim := s.pending.takeVictim()
	s.mu.Unlock()
	if victim != nil {
		s.pushOut(victim)
		pause = acceptPauses[0]
	}
	select {
	case <-s.ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}
