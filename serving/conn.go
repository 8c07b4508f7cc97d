package serving

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/socket"
)

// Reasons why a connection ends, for every protocol.
var (
	ErrClosed    = errors.New("the server is shutting down")
	ErrKicked    = errors.New("an operator has ended the session")
	ErrPushedOut = errors.New("its peer had not introduced itself, and it must make room")
	ErrSilent    = fmt.Errorf("the peer's machine is silent: %w", unix.ETIMEDOUT)
	ErrStill     = errors.New("memory is scarce, and the peer neither takes its answers nor " +
		"finishes its request")
	ErrRefused = errors.New("the disks are refused")
)

// EndOf is the label of metrics for the reason why a connection ended; "": the reason is not one of
// this package.
func EndOf(err error) string {
	switch {
	case errors.Is(err, ErrClosed):
		return "shutdown"
	case errors.Is(err, ErrRefused):
		return "refused"
	case errors.Is(err, ErrKicked):
		return "kicked"
	case errors.Is(err, ErrRemoved):
		return "removed"
	case errors.Is(err, ErrPushedOut):
		return "pushed_out"
	}
	return ""
}

// Conn is what connections of all protocols have: the network, the client, and why the connection
// ended. A front end's own type embeds it, and calls Init first.
type Conn struct {
	Arrival
	// Slowed says that the peer has failed so often that the log mentions it only once a minute.
	Slowed bool
	// Process is the id of the peer's process on this machine; 0: it is unknown.
	Process int32

	client   atomic.Pointer[Client] // nil: there is none yet
	cred     *unix.Ucred
	requests sync.WaitGroup // the goroutines that may execute requests
	cause    atomic.Pointer[error]
	gone     chan struct{} // closed by Fail
	stopped  chan struct{} // closed by Stop

	mu       sync.Mutex
	nc       net.Conn // guarded by mu
	stopping bool     // guarded by mu; Stop was called
}

// Init prepares the Conn for a connection that was accepted.
func (c *Conn) Init(nc net.Conn) {
	c.nc, c.gone, c.stopped = nc, make(chan struct{}), make(chan struct{})
	c.Source = SourceOf(nc).String()
	if c.cred = socket.Peer(nc); c.cred != nil {
		c.Process = c.cred.Pid
		c.Source = c.Remote()
		if c.Process == 0 { // in another container, whose processes the system does not tell
			c.Source = nc.LocalAddr().String()
		}
	}
}

// SetClient sets the client whose requests come by the connection.
func (c *Conn) SetClient(client *Client) { c.client.Store(client) }

// Base is the Conn of a type that embeds it.
func (c *Conn) Base() *Conn { return c }

// MayUse returns an error unless the peer at a Unix socket is a process of this user, of root or of
// one of uids. The socket's mode alone does not decide who may use the disks.
func (c *Conn) MayUse(uids []uint32) error {
	if _, ok := c.Network().(*net.UnixConn); !ok {
		return nil
	}
	switch {
	case c.cred == nil:
		return errors.New("the system does not say who the client is")
	case c.cred.Uid != 0 && int(c.cred.Uid) != os.Geteuid() && !slices.Contains(uids, c.cred.Uid):
		return errors.New("the client's user may not use this socket")
	}
	return nil
}

// Remote says where the peer is: an address, or the number of a process on this machine.
func (c *Conn) Remote() string {
	if c.Process != 0 {
		return fmt.Sprintf("process %d", c.Process)
	}
	return c.Network().RemoteAddr().String()
}

// Network is the connection to the peer's machine.
func (c *Conn) Network() net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nc
}

// TakeSocket takes the connection away from Go's poller, and returns a Wire to use from now on.
// After an error, the connection works as before, only slower. Nobody else may read or write
// meanwhile.
func (c *Conn) TakeSocket(pollers *socket.PollLimit) (socket.Wire, error) {
	s, err := socket.New(c.Network(), pollers)
	if err != nil {
		return &socket.Plain{Conn: c.Network()}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.nc.Close()
	c.nc = s
	if c.cause.Load() != nil {
		_ = s.Close()
	}
	if c.stopping {
		_ = s.SetReadDeadline(past)
	}
	return s, nil
}

// past is a deadline that ends a wait at once.
var past = time.Unix(1, 0)

// SetDeadline limits how long the peer may take; zero: no limit.
func (c *Conn) SetDeadline(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.nc.SetDeadline(at)
	if c.stopping {
		_ = c.nc.SetReadDeadline(past)
	}
}

// Stop makes the connection read nothing more. Requests that were read go on.
func (c *Conn) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopping {
		c.stopping = true
		close(c.stopped)
	}
	_ = c.nc.SetReadDeadline(past)
}

// Fail closes the network because of err. It returns false if the connection has ended before.
func (c *Conn) Fail(err error) (first bool) {
	if !c.cause.CompareAndSwap(nil, &err) {
		return false
	}
	close(c.gone)
	_ = c.Network().Close()
	return true
}

// Cause is why the connection has ended; nil: it has not ended.
func (c *Conn) Cause() error {
	if err := c.cause.Load(); err != nil {
		return *err
	}
	return nil
}

// Gone is closed when the connection has ended.
func (c *Conn) Gone() <-chan struct{} { return c.gone }

// HungUp reports whether the peer has closed the connection, even if nobody has read its end yet.
func (c *Conn) HungUp() bool { return c.Cause() != nil || socket.HungUp(c.Network()) }

// Silent reports whether the peer's machine has acknowledged nothing for that long.
func (c *Conn) Silent(d time.Duration) bool { return socket.Silent(c.Network(), d) }

// Add counts a goroutine, or other work that may execute requests. Done ends it.
func (c *Conn) Add() { c.requests.Add(1) }

// Done ends the work that Add has counted.
func (c *Conn) Done() { c.requests.Done() }

// AwaitRequests waits until Serve and all other work that may execute requests of the connection
// has ended.
func (c *Conn) AwaitRequests() { c.requests.Wait() }
