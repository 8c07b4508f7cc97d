package nbd

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// stackCharge is how many bytes a goroutine that hangs in a disk counts for in the limit of memory.
const stackCharge = 16 << 10

// conn is one connection, from accept to close.
type conn struct {
	srv    *Server
	nc     net.Conn
	portal *Portal
	name   string // what the client is called
	// certified says that the name is its certificate's
	certified bool
	enlisted  bool // it counts in Server.named
	arrival   serving.Arrival
	slowed    bool  // the peer has failed so often that the log has it once a minute
	accepted  bool  // the observer knows of the session
	pid       int32 // of the client's process; 0: unknown
	since     time.Time

	structured, extended bool
	contexts             contextSet
	snapshots            []disk.Snapshot // the snapshots of contextBitmap and the next ones

	// Set when the client has chosen an export, under Server.mu.
	client *serving.Client
	disk   *serving.Disk
	role   *serving.Reader
	far    *Remote       // the disk, if another server has it
	share  *memory.Share // the client's

	rx receiver
	tx sender
	// posted is the connection at which forwarded requests wait to be sent; nil: there are none. It
	// belongs to the goroutine that reads. weight tells how urgent that is, as for replies.
	posted *link
	weight int
	long   atomic.Int32 // long requests that are executed; see enter
	blind  atomic.Bool  // its reader executes one more, and does not see the connection's end
	lost   atomic.Bool  // it has ended, and not because the client said that it is done
	// sessionName is what the client calls the connections of which it uses one at a time, the
	// newest one; "": they have no name. Guarded by Server.mu.
	sessionName string
	loops       sync.WaitGroup // the goroutines that may execute requests

	commands, bytesRead, bytesWritten atomic.Uint64

	mu       sync.Mutex
	wire     io.Closer // guarded by mu; what fail closes, besides nc
	held     runs      // guarded by mu; requests that wait for far content
	cause    error     // guarded by mu; why fail was called
	stopping bool      // guarded by mu; stop was called
}

// Serve implements serving.Connection.
func (c *conn) Serve() {
	if err := c.negotiate(); err != nil {
		c.end(err)
		if c.disk != nil {
			c.loops.Done()
		}
		return
	}
	c.srv.conns.Goroutines.Add(1) // the loop's
	c.role.Run()
}

// negotiate runs the handshake, and prepares the transmission.
func (c *conn) negotiate() (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = c.panicked(p)
		}
	}()
	if err := c.identify(); err != nil {
		return err
	}
	if err := c.wait(); err != nil {
		return err
	}
	c.setDeadline(time.Now().Add(handshakeTime))
	h := &handshake{c: c, nc: c.nc}
	if err := h.run(); err != nil {
		return err
	}
	c.setDeadline(time.Time{})
	early, _ := h.in.Peek(h.in.Buffered())
	w := c.takeWire(h.nc)
	c.tx.init(w, c.srv.disks.Memory)
	c.rx.init(w, c.srv.disks.Memory, early)
	c.rx.beforeWait = func() error {
		c.sendForwarded()
		return c.tx.Flush()
	}
	c.rx.beforeMore = func() error {
		if c.tx.full() || c.srv.disks.Memory.Exhausted() {
			c.sendForwarded()
			return c.tx.Flush()
		}
		return nil
	}
	c.accepted = true
	c.srv.disks.Observer.LoginAccepted(serving.LoginEvent{Client: c.name,
		Remote: c.remote(), Target: c.srv.exportOf(c.disk)})
	level := zap.InfoLevel
	if c.slowed {
		level = zap.DebugLevel
	}
	c.log().Log(level, "NBD client", zap.Uint16("lun", c.disk.Number))
	return nil
}

// takeWire returns what carries the requests: a socket of our own, if that is possible.
func (c *conn) takeWire(nc net.Conn) socket.Wire {
	if t, ok := nc.(*tls.Conn); ok {
		return newTLSWire(t, c.share)
	}
	pollers := &c.srv.pollers
	if c.far != nil { // the next request comes when a reply has, which takes longer
		pollers = nil
	}
	s, err := socket.New(nc, pollers)
	if err != nil {
		return &socket.Plain{Conn: nc}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = nc.Close()
	if c.cause != nil {
		_ = s.Close()
	}
	if c.stopping {
		_ = s.SetReadDeadline(past)
	}
	c.wire = s
	return s
}

// attach makes a disk the connection's. The caller's goroutine counts in loops then.
func (c *conn) attach(d *serving.Disk, session string, heir bool) {
	who := serving.Who{Name: c.name, Incarnation: session, Heir: heir, Crowd: !c.certified,
		Process: c.pid, Line: c}
	if host, _, err := net.SplitHostPort(c.nc.RemoteAddr().String()); err == nil {
		who.Address = host
	}
	client := c.srv.disks.AttachTo(d, who)
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	c.client, c.disk, c.sessionName, c.since = client, d, session, time.Now()
	c.loops.Add(1)
	c.role = c.srv.disks.NewReader(c.loop, c.handOn)
	c.far, _ = d.Disk.(*Remote)
	c.share = c.srv.disks.Memory.Join(c.peer())
	c.share.Charge(c.cost())
}

func (c *conn) log() *zap.Logger {
	return c.srv.log.With(zap.String("client", c.name), zap.String("remote", c.remote()))
}

// HungUp implements serving.Line.
func (c *conn) HungUp() bool { return c.ended() != nil || socket.HungUp(c.network()) }

// End implements serving.Line.
func (c *conn) End(err error) { c.fail(err) }

// Requests implements serving.Line.
func (c *conn) Requests() { c.loops.Wait() }

// Arrived implements serving.Connection.
func (c *conn) Arrived() *serving.Arrival { return &c.arrival }

// Session describes the connection.
func (c *conn) Session() status.Session {
	return status.Session{Protocol: status.ProtocolNBD, Initiator: c.name,
		Remote: c.remote(), Local: c.nc.LocalAddr().String(), Since: c.since,
		LUNs: []uint16{c.disk.Number}, Commands: c.commands.Load(), BytesRead: c.bytesRead.Load(),
		BytesWritten: c.bytesWritten.Load()}
}

// run is a goroutine that executes a connection's requests.
type run struct {
	*serving.Turn
	c    *conn
	req  request
	r    serving.Request
	buf  *memory.Buffer // of the request
	more []*memory.Buffer
	long bool // it counts in conn.long
	// blind says that the run has set conn.blind
	blind bool
	// receiving says that a part of the request's payload is still to come
	receiving bool
	arrived   time.Time // when the request did
	// begun is when its current disk call began
	begun time.Time
}

// loop is the main loop of the reading goroutine.
func (c *conn) loop(turn *serving.Turn) {
	defer c.srv.conns.Goroutines.Done()
	defer c.loops.Done()
	run := &run{Turn: turn, c: c}
	run.r.Executor = run
	err := run.work()
	if !run.Reading {
		if ferr := c.tx.Flush(); err == nil { // nobody else may ever come by
			err = ferr
		}
		c.srv.disks.Memory.Charge(-stackCharge)
		if err != nil {
			c.fail(err)
		}
		return
	}
	c.end(err)
}

// work reads and executes requests until the connection ends or another goroutine reads.
func (run *run) work() (err error) {
	c := run.c
	defer func() {
		if p := recover(); p != nil {
			run.Leave()
			run.forget()
			err = c.panicked(p)
		}
		if run.Reading {
			c.sendForwarded()
		}
	}()
	for {
		if run.req, err = c.rx.next(c.extended); err != nil {
			return err
		}
		run.arrived = time.Now()
		if err = run.handle(); err != nil {
			return err
		}
		if !run.Reading {
			return nil
		}
		if c.tx.full() {
			c.sendForwarded()
			if err := c.tx.Flush(); err != nil {
				return err
			}
		}
	}
}

// handOn prepares for another goroutine that reads.
func (c *conn) handOn() {
	c.srv.disks.Memory.Charge(stackCharge)
	c.srv.conns.Goroutines.Add(1)
	c.loops.Add(1)
}

// Waits implements serving.Executor: another goroutine reads while the request waits for far
// content, unless memory is exhausted, or the rest of the request is still to be read. The client
// has no limit of time, so there is none here.
func (run *run) Waits() (time.Duration, error) {
	c := run.c
	c.mu.Lock()
	if c.cause != nil {
		c.mu.Unlock()
		return 0, serving.ErrAborted
	}
	if c.held == nil {
		c.held = make(runs)
	}
	c.held[run] = struct{}{}
	c.mu.Unlock()
	// Whoever has fenced the client ends the requests in held. This one may have come too late.
	if !c.client.Admitted(c.disk) {
		return 0, serving.ErrAborted
	}
	if !run.receiving && !c.srv.disks.Memory.Exhausted() {
		run.PassOn()
	}
	return forever, nil
}

// forever is longer than any request waits.
const forever = 10 * 365 * 24 * time.Hour

// forget gives back what the request holds.
func (run *run) forget() {
	run.buf.Release()
	for _, b := range run.more {
		b.Release()
	}
	clear(run.more)
	run.buf, run.more, run.receiving = nil, run.more[:0], false
	if run.long {
		run.long = false
		run.c.long.Add(-1)
	}
	if run.blind {
		run.blind = false
		run.c.blind.Store(false)
	}
	if !run.r.Waited() {
		return
	}
	c := run.c
	c.mu.Lock()
	delete(c.held, run)
	c.mu.Unlock()
	run.r = serving.Request{Executor: run}
}

// ended returns why the connection has ended; nil: it has not.
func (c *conn) ended() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// giveUp ends the requests that wait for far content.
func (c *conn) giveUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for run := range c.held {
		run.r.Abort()
	}
	if c.far != nil {
		c.far.giveUp(c)
	}
}

// fail closes the network because of err. The reader then ends the connection.
func (c *conn) fail(err error) {
	c.mu.Lock()
	first := c.cause == nil
	if first {
		c.cause = err
		c.lost.Store(!errors.Is(err, errDisconnected))
	}
	w := c.wire
	c.mu.Unlock()
	if !first {
		return
	}
	_ = c.nc.Close()
	if w != nil {
		_ = w.Close()
	}
	c.giveUp()
}

// stop ends the connection at the end of the requests that are here.
func (c *conn) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopping = true
	if s, ok := c.wire.(*socket.Socket); ok {
		_ = s.SetReadDeadline(past)
		return
	}
	_ = c.nc.SetReadDeadline(past)
}

// past is a deadline that ends a wait at once.
var past = time.Unix(1, 0)

// setDeadline limits how long the client may take, unless the connection stops anyway.
func (c *conn) setDeadline(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.nc.SetDeadline(at)
	if c.stopping {
		_ = c.nc.SetReadDeadline(past)
	}
}

func (c *conn) panicked(p any) error {
	c.srv.disks.Observer.PanicCaught()
	c.log().Error("internal error: the NBD connection ends", zap.Any("panic", p),
		zap.ByteString("stack", debug.Stack()))
	return errors.New("internal error")
}

// runs is a set of goroutines.
type runs map[*run]struct{}
