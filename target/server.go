// Package target is an iSCSI target (RFC 7143, error recovery level 0, one connection per session)
// that serves disks as logical units.
//
// Each connection has one reading goroutine. It executes commands itself, because a page cache
// answers faster than another goroutine wakes. If a disk call takes longer than a few milliseconds,
// a new goroutine becomes the reader (see serving.Reader), so that nothing else on the connection
// waits for the call. Responses are queued, and one system call writes all of them before the
// reader waits for the network again.
package target

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/internal/login"
	"kubevirt.io/disk/target/internal/scsi"
)

// ErrServerClosed is the error of Serve after Shutdown or Close.
var ErrServerClosed = serving.ErrClosed

// Server serves the LUNs of one target on any number of portals.
type Server struct {
	opt    Options
	log    *zap.Logger
	device *scsi.Device
	login  login.Config
	pool   *memory.Pool
	conns  *serving.Connections[*conn] // a peer is an address
	clock  atomic.Int64                // nanoseconds since start, at least 1, at most one tick old

	// working is how many readers do not wait for the network.
	working atomic.Int64
	pollers socket.PollLimit

	start time.Time

	ctx    context.Context // ends with the server
	cancel context.CancelFunc

	mu        sync.Mutex
	sessions  map[sessionKey]*session // guarded by mu; normal sessions
	discovery map[*session]struct{}   // guarded by mu
	lastTSIH  uint16                  // guarded by mu
}

// New makes a server. It fails if the options contradict each other.
func New(opt Options) (*Server, error) {
	if err := opt.resolve(); err != nil {
		return nil, fmt.Errorf("target: %w", err)
	}
	s := &Server{}
	device, err := scsi.New(scsi.Options{TargetName: opt.TargetName, Log: opt.Log,
		Abort: s.abortFenced}, opt.Disks)
	if err != nil {
		return nil, fmt.Errorf("target: %w", err)
	}
	*s = Server{
		opt:    opt,
		log:    opt.Log,
		device: device,
		pool:   opt.Disks.Memory,
		login: login.Config{TargetName: opt.TargetName, PortalGroupTag: scsi.PortalGroup,
			Auth: opt.Auth},
		start:     time.Now(),
		sessions:  make(map[sessionKey]*session),
		discovery: make(map[*session]struct{}),
		conns: serving.NewConnections[*conn](serving.Rules{Disks: opt.Disks, Log: opt.Log,
			Crowd: serving.Crowd{Sessions: opt.Limits.MaxConnections,
				PerPeer: opt.Limits.MaxPerAddress, Strangers: opt.Limits.MaxPendingLogins},
			Delay: opt.Limits.LoginDelay, Every: janitorTick, Tick: s.tick}),
	}
	s.clock.Store(1)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := opt.Disks.Serve(front{s}); err != nil {
		return nil, fmt.Errorf("target: %w", err)
	}
	return s, nil
}

// Serve accepts connections on l until the server is shut down, and then returns ErrServerClosed.
// It may be called for several listeners, and closes l.
func (s *Server) Serve(l net.Listener) error {
	return s.conns.Accept(l, s.newConn)
}

// drop forgets a connection.
func (s *Server) drop(c *conn) {
	s.conns.Drop(c)
	if c.role != nil {
		c.role.Close()
		c.late.Close()
		c.dropLate()
	}
}

// register registers sess with a new TSIH. The initiator has authenticated. If sess reinstates a
// session (RFC 7143 6.3.5), register ends the tasks of that session and returns it; the caller ends
// the rest.
func (s *Server) register(sess *session) (old *session, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns.Closing() { // Shutdown looks for sessions after that
		return nil, serving.ErrClosed
	}
	s.lastTSIH++
	for s.lastTSIH == 0 || s.tsihInUseLocked(s.lastTSIH) {
		s.lastTSIH++
	}
	sess.tsih = s.lastTSIH
	if sess.discovery() {
		old = s.sameDiscoveryLocked(sess)
	} else {
		old = s.sessions[sess.key]
	}
	if old != nil && !s.mayReinstate(sess, old) {
		return nil, errNotYours
	}
	if err := s.conns.Admit(&sess.conn.Arrival, sess.conn.Source,
		old != nil); err != nil { // the old session makes room
		return nil, err
	}
	if old != nil {
		// Do this before the new session takes the old one's place. From then on a fence or a reset
		// does not find the old session, and would miss its writes.
		old.conn.fail(errReinstated)
		old.close()
	}
	sess.counts = true
	sess.conn.share = s.pool.Join(sess.conn.Source)
	sess.width = s.pool.OpenWindow(s.opt.Limits.CommandWindow)
	sess.window.max.Store(sess.window.exp.Load() + uint32(sess.width) - 1)
	if sess.discovery() {
		s.discovery[sess] = struct{}{}
	} else {
		s.sessions[sess.key] = sess
	}
	return old, nil
}

// mayReinstate reports whether a session may take the place of another one. Both must have the same
// user, unless the credential of the old one was replaced: its initiator comes back with the new
// credential, for example after a broken connection.
func (s *Server) mayReinstate(sess, old *session) bool {
	return old.login.User == sess.login.User || s.opt.Auth != nil &&
		!s.opt.Auth.Knows(old.login.User)
}

// sameDiscoveryLocked returns the discovery session that sess reinstates: one with the same
// initiator and ISID, and, if it names no target, at the same portal (RFC 7143 7.4.2).
func (s *Server) sameDiscoveryLocked(sess *session) *session {
	for o := range s.discovery {
		if o.key == sess.key && o.login.TargetName == sess.login.TargetName &&
			(sess.login.TargetName != "" || o.conn.local.String() == sess.conn.local.String()) {
			return o
		}
	}
	return nil
}

var errNotYours = errors.New("a session of this name and identifier belongs to another user")

func (s *Server) tsihInUseLocked(tsih uint16) bool {
	for _, o := range s.sessions {
		if o.tsih == tsih {
			return true
		}
	}
	for o := range s.discovery {
		if o.tsih == tsih {
			return true
		}
	}
	return false
}

// remove forgets sess, unless another session has taken its place.
func (s *Server) remove(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[sess.key] == sess {
		delete(s.sessions, sess.key)
	}
	delete(s.discovery, sess)
	if !sess.counts {
		return
	}
	sess.counts = false
	s.pool.CloseWindow(sess.width)
	sess.conn.share.Part()
	s.conns.Leave(&sess.conn.Arrival)
}

// hasSession reports whether this user has a session with this key and TSIH.
func (s *Server) hasSession(key sessionKey, tsih uint16, user string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.sessions[key]; o != nil && o.tsih == tsih {
		return o.login.User == user
	}
	for o := range s.discovery {
		if o.key == key && o.tsih == tsih {
			return o.login.User == user
		}
	}
	return false
}

// registered reports whether a session counts: it has not ended, and no other has taken its place.
func (s *Server) registered(sess *session) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sess.counts
}

// allSessions returns every session in full feature phase.
func (s *Server) allSessions() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*session, 0, len(s.sessions)+len(s.discovery))
	for _, sess := range s.sessions {
		list = append(list, sess)
	}
	for sess := range s.discovery {
		list = append(list, sess)
	}
	return list
}

// Sessions lists the sessions in full feature phase, oldest first.
func (s *Server) Sessions() []status.Session {
	return s.conns.Sessions()
}

// EndSessions ends the sessions for which which returns true, at once and without asking their
// initiators, and returns them. The initiators may log in again. Commands end without an answer.
// Disk calls in progress go on, and their writes may still reach the disk. When EndSessions
// returns, these sessions claim no LUN any more, except those with such a write under way.
func (s *Server) EndSessions(which func(status.Session) bool) []status.Session {
	return s.conns.Kick(which)
}
