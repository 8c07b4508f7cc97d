package nbd

import "io"

// endStale ends the connections at a disk that clients of c's name have closed, even if their
// readers have not noticed yet. A client that has lost a connection, and makes another one, is not
// kept out by the old one: it is known by its process, but not in another container. Requests of
// the old connection that have not begun are given up, so none comes after those of c.
func (s *Server) endStale(c *conn) {
	name := c.client.Name()
	s.mu.Lock()
	stale := s.allLocked(func(o *conn) bool {
		return o != c && o.holds && o.disk == c.disk && o.client.Name() == name &&
			(o.ended() != nil || o.tx.Wire.Ended())
	})
	s.mu.Unlock()
	for _, o := range stale {
		o.fail(io.EOF)
		s.mu.Lock()
		s.releaseLocked(o)
		s.mu.Unlock()
	}
}

// releaseLocked is the inverse of hold.
func (s *Server) releaseLocked(c *conn) {
	if !c.holds {
		return
	}
	c.holds = false
	if h := s.holders[holding{c.disk, c.client.Name()}]; h != nil {
		h.conns--
	}
}
