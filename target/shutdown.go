package target

import (
	"context"
	"time"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
)

const (
	// logoutGrace is how long an initiator has to answer a logout request (RFC 7143 11.9.1). Then
	// its command window is closed. Its connection ends when all its commands are answered and it
	// has been silent for logoutSilence. If it owes data for commands, or takes no answers, the
	// connection ends after a silence of logoutGrace: the initiator's machine may be gone.
	logoutGrace   = 2 * time.Second
	logoutSilence = 2 * janitorTick // by the coarse clock: longer than one tick
)

// Shutdown stops the server without losing acknowledged data. It accepts no new connections, asks
// every initiator to log out (RFC 7143 11.9.1), lets the commands in flight finish, and closes the
// connections. If ctx ends first, Shutdown closes the remaining connections and returns the error
// of ctx. Then disk calls may still be in progress, and the disks must not be closed.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stopAccepting()
	for _, sess := range s.allSessions() {
		sess.requestLogout()
	}
	grace := time.NewTimer(logoutGrace)
	defer grace.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	idleIsOver := false
	for {
		s.closeFinished(idleIsOver)
		if len(s.allSessions()) == 0 {
			break
		}
		select {
		case <-ctx.Done():
			_ = s.cut(ctx) // usually, everything ends soon after the connections
			return ctx.Err()
		case <-grace.C:
			idleIsOver = true
			for _, sess := range s.allSessions() {
				sess.closeWindow()
			}
		case <-tick.C:
		}
	}
	return s.cut(ctx)
}

// Close ends every connection at once and waits for the disk calls in progress.
func (s *Server) Close() error {
	s.stopAccepting()
	return s.cut(context.Background())
}

func (s *Server) stopAccepting() {
	s.conns.Close()
	for _, c := range s.conns.All(func(c *conn) bool { return c.session() == nil }) {
		c.fail(serving.ErrClosed) // not logged in: nothing to lose
	}
}

// closeFinished ends discovery sessions, and with idle also normal sessions that are quiet.
func (s *Server) closeFinished(idle bool) {
	for _, sess := range s.allSessions() {
		if sess.discovery() || idle && sess.quiet() {
			sess.end(serving.ErrClosed)
		}
	}
}

// cut closes the remaining connections and waits until the last goroutine or ctx has ended.
func (s *Server) cut(ctx context.Context) error {
	for _, c := range s.conns.All(func(*conn) bool { return true }) {
		c.End(serving.ErrClosed)
	}
	s.cancel()
	return s.conns.Finish(ctx)
}

// quiet reports whether the initiator has been silent for a while and none of its commands can go
// on: every response has been passed to the network, or the network takes no more.
func (s *session) quiet() bool {
	c := s.conn
	executing, waiting := s.inFlight()
	idle, since := c.tx.Idle(), c.tx.WriteSince.Load()
	now := c.srv.clock.Load()
	// Look at this last, so that PDUs that come meanwhile count.
	silent := time.Duration(now - c.rx.Heard.Load())
	switch {
	case since != 0 && time.Duration(now-since) >= logoutGrace:
		return silent >= logoutGrace
	case waiting > 0:
		return executing == 0 && idle && silent >= logoutGrace
	}
	return executing == 0 && idle && silent >= logoutSilence
}

// inFlight counts the commands that are executing, and those that wait for data.
func (s *session) inFlight() (executing, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if t.state == taskCollecting {
			waiting++
		}
	}
	return len(s.tasks) - waiting, waiting
}

// requestLogout asks the initiator to log out, by an asynchronous message.
func (s *session) requestLogout() {
	if s.discovery() || !s.open.Load() {
		return
	}
	s.conn.sendSoon(&pdu.AsyncMessage{ // the peer may have stopped reading
		Event:      pdu.AsyncLogoutRequest,
		Parameter3: uint16(logoutGrace / time.Second),
	}, snAdvance)
}
