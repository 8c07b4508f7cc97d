package nbd

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// ErrServerClosed is returned by Serve after Shutdown.
var ErrServerClosed = serving.ErrClosed

const (
	// handshakeTime is how long a client may take until it has chosen an export.
	handshakeTime = 30 * time.Second
	// stillTimeout is how long a client may leave its replies unread, or a payload unfinished,
	// while memory is scarce. Otherwise it may take any time: a machine may be stopped for hours.
	stillTimeout = 30 * time.Second
	// deadAfter is how long a client's machine may acknowledge nothing.
	deadAfter = 40 * time.Second
	// lookEvery is the time between two looks at clients that stand still or are dead.
	lookEvery = 5 * time.Second
)

// Options are those of a Server.
type Options struct {
	Disks *serving.Disks
	Log   *zap.Logger // nil: no log
	// Crowd limits the connections. A session is a connection that has chosen an export. A client
	// is a certificate's name, a process at a socket, or an address.
	Crowd serving.Crowd
	// ReconnectDelay is the longest delay of a client whose connections have failed several times
	// within the last minute. Default 2 s; less than 0: there is none.
	ReconnectDelay time.Duration
}

// Portal is an address at which clients connect, and says how they are identified.
type Portal struct {
	// Name is the name of clients without a certificate: serving.SocketPrefix and the path, or
	// serving.AddressPrefix and the address.
	Name string
	// TLS, if it is not nil, is required. It must verify the client's certificate, whose name is
	// the client's.
	TLS *tls.Config
	// UIDs are the users who may connect by a Unix socket, in addition to this process's user and
	// root. They also need the right to open the socket.
	UIDs []uint32
	// SameUser says that only processes of this process's user and network namespace may connect at
	// an address, which must be one of IPv4.
	SameUser bool
}

// Server serves disks by NBD. Any number of goroutines may call the methods.
type Server struct {
	disks   *serving.Disks
	log     *zap.Logger
	conns   *serving.Connections[*conn]
	pollers socket.PollLimit
	ctx     context.Context // ends when Shutdown gives up waiting, with ErrServerClosed
	cancel  context.CancelCauseFunc

	missed *serving.Seldom[string] // names of exports that do not exist

	mu sync.Mutex
	// named are the clients with certificates, by name
	named map[string]*holderOfName
	// guarded by mu; the disk that was removed while clients had it by the empty name; zero: none.
	// The disk itself would stay in memory
	lost     disk.Identity
	lostName string // guarded by mu; that disk's name
}

// missedInterval is how long the log does not repeat that an export does not exist.
const missedInterval = 10 * time.Minute

// New makes a server, and adds it as a front end of the disks. There must be no disk yet.
func New(opt Options) (*Server, error) {
	s := &Server{disks: opt.Disks, log: opt.Log, missed: serving.NewSeldom[string](missedInterval),
		named: map[string]*holderOfName{}}
	s.log = cmp.Or(s.log, zap.NewNop())
	s.conns = serving.NewConnections[*conn](serving.Rules{Disks: opt.Disks, Log: s.log,
		Crowd: opt.Crowd, Delay: cmp.Or(opt.ReconnectDelay, 2*time.Second), Every: lookEvery,
		Gated: true})
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	if err := s.disks.Serve(front{Server: s}); err != nil {
		return nil, fmt.Errorf("nbd: %w", err)
	}
	return s, nil
}

// Serve accepts connections until the server is shut down, and then returns ErrServerClosed. It
// closes l.
func (s *Server) Serve(l net.Listener, p Portal) error {
	if !serving.ValidName(p.Name) || !strings.HasPrefix(p.Name, serving.SocketPrefix) &&
		!strings.HasPrefix(p.Name, serving.AddressPrefix) {
		_ = l.Close()
		return fmt.Errorf("a portal cannot be called %q: it is unix: and a path, or tcp: and an "+
			"address, of at most 223 bytes without spaces", p.Name)
	}
	return s.conns.Accept(l, func(nc net.Conn) *conn { return s.newConn(nc, &p) })
}

func (s *Server) newConn(nc net.Conn, p *Portal) *conn {
	c := &conn{srv: s, portal: p, name: p.Name}
	c.Init(nc)
	return c
}

// chosen notes that a connection has chosen an export.
func (s *Server) chosen(c *conn) error {
	if s.conns.Closing() {
		return ErrServerClosed
	}
	switch err := s.conns.Admit(&c.Arrival, c.peer(), false); {
	case errors.Is(err, serving.ErrPeerCrowded):
		return fmt.Errorf("%s has as many connections as one client may have", c.name)
	case err != nil:
		return errors.New("there are as many connections as the server may have")
	}
	return nil
}

// Shutdown refuses new clients and new options, ends the connections, and waits for requests under
// way. Replies that are ready are sent. Requests that wait for far content are given up. If the
// context ends first, because a disk hangs or a client does not take its replies, Shutdown returns
// its error.
func (s *Server) Shutdown(ctx context.Context) error {
	defer s.cancel(ErrServerClosed)
	return s.conns.Drain(ctx)
}

// allLocked returns the connections for which which returns true. which may use fields guarded by
// mu.
func (s *Server) allLocked(which func(*conn) bool) []*conn { return s.conns.All(which) }

// Sessions returns the connections that have chosen an export, the oldest one first.
func (s *Server) Sessions() []status.Session {
	return s.conns.Sessions()
}

// EndSessions ends the connections for which which returns true, at once, and returns them. Their
// clients may connect again. Requests end without an answer. When EndSessions returns, none of them
// claims a disk any more, except those with a write under way.
func (s *Server) EndSessions(which func(status.Session) bool) []status.Session {
	return s.conns.Kick(which)
}

// front is the server as a front end of the disks in use.
type front struct {
	*Server
	serving.NoRights
}

// Added implements serving.Front. Clients look for exports themselves.
func (f front) Added(*serving.Disk) error { return nil }

// Removed implements serving.Front: connections to the disk end. The protocol has no message for
// that.
func (f front) Removed(d *serving.Disk) {
	f.mu.Lock()
	conns := f.allLocked(func(c *conn) bool { return c.disk == d })
	if slices.ContainsFunc(conns, func(c *conn) bool { return c.unnamed }) {
		f.lost, f.lostName = d.Identity, describe(d)
	}
	f.mu.Unlock()
	for _, c := range conns {
		c.fail(serving.ErrRemoved)
	}
}

// Resized implements serving.Front. The protocol has no message for that: a client learns the size
// when it connects again.
func (f front) Resized(*serving.Disk) {}

// Protected implements serving.Front. Writes are refused from now on.
func (f front) Protected(d *serving.Disk) { f.endSessions(d) }

func (f front) Shared(d *serving.Disk) { f.endSessions(d) }

// endSessions ends the connections of sessions: their clients connect again at once, and learn the
// disk's new state.
func (f front) endSessions(d *serving.Disk) {
	f.mu.Lock()
	conns := f.allLocked(func(c *conn) bool { return c.disk == d && c.sessionName != "" })
	f.mu.Unlock()
	for _, c := range conns {
		c.fail(errChanged)
	}
}

// Fence implements serving.Front: requests that wait for far content are given up. The connection
// of a superseded session is of no use any more, and ends.
func (f front) Fence(d *serving.Disk, fenced func(string) bool) (serving.Fencing, error) {
	return serving.FenceBy(func() {
		f.mu.Lock()
		conns := f.allLocked(func(c *conn) bool {
			return c.disk == d && fenced(c.client.Name())
		})
		f.mu.Unlock()
		for _, c := range conns {
			if c.client.Superseded(c.disk) {
				c.fail(errSuperseded)
			}
			c.giveUp()
		}
	}), nil
}
