package nbd

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"strings"
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

// conn is one connection, from accept to close.
type conn struct {
	serving.Conn
	srv    *Server
	portal *Portal
	name   string // the client's name
	// certified says that the name comes from the client's certificate
	certified bool
	enlisted  bool // the connection is counted in Server.named
	accepted  bool // the observer has got the event of the login
	since     time.Time

	structured, extended bool
	contexts             contextSet
	snapshots            []disk.Snapshot // the snapshots of contextBitmap and the next ones

	// These are set under Server.mu when the client has chosen an export.
	client  *serving.Client
	disk    *serving.Disk
	unnamed bool // the export was chosen by the empty name
	role    *serving.Reader
	late    *serving.Late[lateRequest]
	lates   atomic.Int32  // goroutines that execute postponed requests
	beside  atomic.Int32  // goroutines that execute a request in addition to the reader
	far     *Remote       // the disk, if another server has it
	share   *memory.Share // the client's share

	rx receiver
	tx sender
	// posted is the connection to another server that has queued forwarded requests; nil: none.
	// weight says how urgent it is to send them, as for replies. Only the reader uses both.
	posted *link
	weight int
	long   atomic.Int32 // long requests under way; see enter
	blind  atomic.Bool  // the reader executes a long request, and does not see the connection's end
	// sessionName is the name of the session that the connection is for: see session.go. "": none.
	// Guarded by Server.mu.
	sessionName string

	commands, bytesRead, bytesWritten atomic.Uint64

	mu   sync.Mutex
	held runs // guarded by mu; requests that wait for far content
}

// Serve implements serving.Connection.
func (c *conn) Serve() {
	if err := c.negotiate(); err != nil {
		c.end(err)
		return
	}
	c.role.Run()
}

// negotiate runs the handshake, and prepares the transmission.
func (c *conn) negotiate() (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = c.panicked(p)
		}
	}()
	if err := c.MayUse(c.portal.UIDs); err != nil {
		return err
	}
	if c.portal.SameUser {
		if err := c.sameUser(); err != nil {
			return err
		}
	}
	if err := c.srv.conns.AwaitPenalty(&c.Conn); err != nil {
		return err
	}
	c.SetDeadline(time.Now().Add(handshakeTime))
	h := &handshake{c: c, nc: c.Network()}
	if err := h.run(); err != nil {
		return err
	}
	c.SetDeadline(time.Time{})
	early, _ := h.in.Peek(h.in.Buffered())
	w := c.takeWire(h.nc)
	c.tx.init(w, c.srv.disks.Memory)
	c.rx.init(w, c.srv.disks.Memory, early)
	c.rx.BeforeWait = func() error {
		c.sendForwarded()
		return c.tx.Flush()
	}
	c.rx.BeforeMore = func() error {
		if c.tx.full() || c.srv.disks.Memory.Exhausted() {
			c.sendForwarded()
			return c.tx.Flush()
		}
		return nil
	}
	c.accepted = true
	c.srv.disks.Observer.LoginAccepted(serving.LoginEvent{Client: c.name,
		Remote: c.Remote(), Target: c.srv.exportOf(c.disk)})
	level := zap.InfoLevel
	if c.Slowed {
		level = zap.DebugLevel
	}
	c.log().Log(level, "NBD client", zap.Uint16("lun", c.disk.Number))
	return nil
}

// sameUser returns an error unless the peer is a process of this user, on the same machine or in
// the same pod.
func (c *conn) sameUser() error {
	uid, err := socket.LocalUser(c.Network())
	switch {
	case err != nil:
		return fmt.Errorf("who the client is cannot be told: %w", err)
	case int(uid) != os.Geteuid():
		return fmt.Errorf("the client is of user %d, and only user %d may connect here", uid,
			os.Geteuid())
	}
	return nil
}

// takeWire returns the wire for requests: a socket without Go's poller, if that is possible.
func (c *conn) takeWire(nc net.Conn) socket.Wire {
	if t, ok := nc.(*tls.Conn); ok {
		return newTLSWire(t, c.share)
	}
	pollers := &c.srv.pollers
	if c.far != nil { // the next request comes after a reply from far away, which takes longer
		pollers = nil
	}
	w, _ := c.TakeSocket(pollers)
	return w
}

func (c *conn) attach(d *serving.Disk, unnamed bool, session string, migrationTarget bool) {
	who := serving.Who{Name: c.name, Incarnation: session, MigrationTarget: migrationTarget,
		Crowd: !c.certified, Process: c.Process, Line: c}
	if host, _, err := net.SplitHostPort(c.Network().RemoteAddr().String()); err == nil {
		who.Address = host
	}
	client := c.srv.disks.AttachTo(d, who)
	c.SetClient(client)
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	c.client, c.disk, c.unnamed, c.sessionName, c.since = client, d, unnamed, session, time.Now()
	c.role = c.srv.disks.NewReader(&c.Conn, c.loop, func() { c.beside.Add(1) })
	c.late = serving.NewLate[lateRequest](c.srv.disks, &c.Conn, fewLate, c.lateLoop,
		func() { c.lates.Add(1) })
	c.far, _ = d.Disk.(*Remote)
	c.share = c.srv.disks.Memory.Join(c.peer())
	c.share.Charge(c.cost())
}

func (c *conn) log() *zap.Logger {
	return c.srv.log.With(zap.String("client", c.name), zap.String("remote", c.Remote()))
}

// End implements serving.Connection.
func (c *conn) End(err error) {
	c.fail(err)
	c.srv.mu.Lock()
	client := c.client
	c.srv.mu.Unlock()
	if client != nil {
		client.Detach()
	}
}

// Look implements serving.Connection. It ends the connection in three cases: if the client stands
// still while memory is scarce, if its machine is dead, or if the client is gone while the reader
// executes a long request and does not see that. Others need its memory, or the disk.
func (c *conn) Look(now time.Time, scarce bool) {
	before := func(began *atomic.Int64) bool {
		at := began.Load()
		return at != 0 && at < now.Add(-stillTimeout).UnixNano()
	}
	switch {
	case scarce && (before(&c.rx.Since) || before(&c.tx.WriteSince)):
		c.fail(serving.ErrStill)
	case c.Silent(deadAfter):
		c.fail(serving.ErrSilent)
	case c.blind.Load() && c.HungUp():
		c.fail(io.EOF)
	}
}

// Session implements serving.Connection.
func (c *conn) Session() (status.Session, bool) {
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	if c.disk == nil {
		return status.Session{}, false
	}
	local := c.Network().LocalAddr()
	at := local.String()
	if path, ok := strings.CutPrefix(c.portal.Name, serving.SocketPrefix); ok &&
		local.Network() == "unix" {
		at = path // the listener may have another path for the socket
	}
	return status.Session{Protocol: status.ProtocolNBD, Initiator: c.name, Remote: c.Remote(),
		Local: at, Since: c.since, LUNs: []uint16{c.disk.Number}, Commands: c.commands.Load(),
		BytesRead: c.bytesRead.Load(), BytesWritten: c.bytesWritten.Load()}, true
}

// run is a goroutine that executes a connection's requests.
type run struct {
	*serving.Turn
	c    *conn
	req  request
	r    serving.Request
	buf  *memory.Buffer // of the request
	more []*memory.Buffer
	long bool // it is counted in conn.long
	// single says that the request is a read of one piece, which may be postponed
	single bool
	late   bool // the request was postponed
	// blind says that the run has set conn.blind
	blind bool
	// receiving says that a part of the request's payload is still to come
	receiving bool
	arrived   time.Time // when the request came
	// begun is when the current disk call began
	begun time.Time
}

// loop is the main loop of the reading goroutine.
func (c *conn) loop(turn *serving.Turn) {
	run := &run{Turn: turn, c: c}
	run.r.Executor = run
	err := run.work()
	if !run.Reading {
		defer c.beside.Add(-1)
		if ferr := c.tx.Flush(); err == nil { // perhaps no other goroutine does
			err = ferr
		}
		if err != nil {
			c.fail(err)
		}
		return
	}
	if errors.Is(err, os.ErrDeadlineExceeded) { // a stop: what was read is still executed
		c.late.Start()
		for c.executes() && c.Cause() == nil {
			time.Sleep(time.Millisecond)
		}
	}
	c.end(err)
}

// executes reports whether requests are under way that wait neither for far content nor for another
// server.
func (c *conn) executes() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lates.Load() > 0 || c.far == nil && int(c.beside.Load()) > len(c.held)
}

// lateRequest is a postponed request.
type lateRequest struct {
	request
	arrived time.Time
}

// lateLoop executes requests that wait for storage.
func (c *conn) lateLoop(turn *serving.Turn) {
	defer c.lates.Add(-1)
	run := &run{Turn: turn, c: c}
	run.r.Executor = run
	err := run.workLate()
	if ferr := c.tx.Flush(); err == nil {
		err = ferr
	}
	if err != nil {
		c.fail(err)
	}
}

func (run *run) workLate() (err error) {
	c := run.c
	defer func() {
		if p := recover(); p != nil {
			run.Leave()
			run.forget()
			err = c.panicked(p)
		}
	}()
	for run.Reading {
		next, ok := c.late.Next()
		if !ok {
			return nil
		}
		if err := run.executeLate(next); err != nil {
			return err
		}
	}
	return nil
}

// executeLate executes a postponed read.
func (run *run) executeLate(next lateRequest) error {
	c := run.c
	run.req, run.arrived, run.late = next.request, next.arrived, true
	err := run.finish(run.read())
	run.late = false
	if err == nil && (c.late.Waiting() == 0 || c.tx.full()) {
		err = c.tx.Flush()
	}
	return err
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
		err = c.late.Await(run.Turn, c.rx.Ready, run.executeLate)
		if err != nil || !run.Reading {
			return err
		}
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

// Waits implements serving.Executor: another goroutine reads while the request waits for far
// content, unless memory is exhausted, or the rest of the request is still to be read. An NBD
// client sets no timeout for its requests, so they are held for ever.
func (run *run) Waits() (time.Duration, error) {
	c := run.c
	c.mu.Lock()
	if c.Cause() != nil {
		c.mu.Unlock()
		return 0, serving.ErrAborted
	}
	if c.held == nil {
		c.held = make(runs)
	}
	c.held[run] = struct{}{}
	c.mu.Unlock()
	// A fence of the client ends the requests in held. This request may come too late for that.
	if !c.client.Admitted(c.disk) {
		return 0, serving.ErrAborted
	}
	if !run.receiving && !c.srv.disks.Memory.Exhausted() {
		run.PassOn()
	}
	return forever, nil
}

const (
	// fewLate is how many reads that wait for storage the reader executes itself. More of them are
	// worth another goroutine.
	fewLate = 4
	// maxLate is the most reads that may wait for storage. Clients have fewer under way: Linux 128
	// and QEMU 16.
	maxLate = 256
)

// Blocks implements serving.Executor: another goroutine reads meanwhile.
func (run *run) Blocks() error {
	c := run.c
	switch {
	case run.late: // send the replies that are ready
		c.late.Waits(run.Turn)
		return run.OutsideCall(run.flush)
	case run.receiving || c.srv.disks.Memory.Exhausted():
		return nil
	case run.Reading && run.single:
		if c.late.Waiting() >= maxLate { // the client sends ever more, without waiting for replies
			return nil
		}
		return serving.ErrLater
	}
	run.PassOnCall()
	return nil
}

// Blocked implements serving.Executor.
func (run *run) Blocked(took time.Duration) {
	if run.late {
		run.c.late.Blocked(run.Turn, took)
	}
}

// forever is longer than any request waits.
const forever = 10 * 365 * 24 * time.Hour

// forget releases the memory and the range of the request.
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
	if c.Fail(err) {
		c.giveUp()
	}
}

// lost reports whether the connection has ended without the client's NBD_CMD_DISC.
func (c *conn) lost() bool {
	err := c.Cause()
	return err != nil && !errors.Is(err, errDisconnected)
}

func (c *conn) panicked(p any) error {
	c.srv.disks.Observer.PanicCaught()
	c.log().Error("internal error: the NBD connection ends", zap.Any("panic", p),
		zap.ByteString("stack", debug.Stack()))
	return errors.New("internal error")
}

// runs is a set of goroutines.
type runs map[*run]struct{}
