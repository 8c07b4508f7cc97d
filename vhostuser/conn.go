package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// maxQueues is the most rings of a disk.
const maxQueues = 16

var (
	errBusy = errors.New("another client uses the socket, and the disk has one at a time")
	// errFault says that the front end has cut its memory short.
	errFault = errors.New("the guest's memory is shorter than it was said to be")
)

// conn is one connection, from accept to close: a device of one guest.
type conn struct {
	serving.Conn
	srv      *Server
	nc       *net.UnixConn
	at       *export
	disk     *serving.Disk
	since    time.Time
	accepted bool          // the observer has got the event of the login
	gone     chan struct{} // closed when another connection may use the export

	client *serving.Client // nil: the connection was refused
	share  *memory.Share

	// Settings of the front end; only the message loop uses them.

	features, protocol uint64
	table              *table
	region             *inflightRegion
	queues             [maxQueues]*queue
	status             uint64
	// known says that it is known whether the guest has turned the write cache off. It is unknown
	// for a guest that comes from elsewhere.
	known    bool
	sizeRead uint64 // the size that the front end has read, in sectors
	// toldMemory says that the log already says that memory can be cut short
	toldMemory bool
	// stopTime is what is left of stopTimeout for the next ring that stops
	stopTime time.Duration

	dirty        dirtyLog
	writeThrough atomic.Uint64 // why a write is durable when it ends: see throughOff; 0: not
	running      atomic.Int32  // rings that run

	commands, bytesRead, bytesWritten atomic.Uint64
	settled                           uint64 // commands whose changes are durable

	mu          sync.Mutex
	held        map[*run]struct{} // guarded by mu; requests that wait for far content
	backChannel int               // guarded by mu; the back channel; -1: there is none
	toldBack    bool              // guarded by mu; the log says that a message could not be sent
}

func (s *Server) newConn(nc net.Conn, at *export) *conn {
	c := &conn{srv: s, nc: nc.(*net.UnixConn), at: at, disk: at.disk, since: time.Now(),
		backChannel: -1, gone: make(chan struct{}), held: map[*run]struct{}{}}
	c.features = featureProtocol // rings are disabled until the front end enables them
	c.Init(nc)
	return c
}

// End implements serving.Connection.
func (c *conn) End(err error) {
	c.fail(err)
	c.mu.Lock()
	client := c.client
	c.mu.Unlock()
	if client != nil {
		client.Detach()
	}
}

// Look implements serving.Connection. A front end that stands still costs nothing.
func (c *conn) Look(time.Time, bool) {}

func (c *conn) log() *zap.Logger {
	return c.srv.log.With(zap.String("client", c.at.name), zap.Uint16("lun", c.disk.Number),
		zap.String("remote", c.Remote()))
}

// Session implements serving.Connection.
func (c *conn) Session() (status.Session, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.client == nil {
		return status.Session{}, false
	}
	return status.Session{Protocol: status.ProtocolVhostUser, Initiator: c.at.name,
		Remote: c.Remote(), Local: c.at.path, Since: c.since, LUNs: []uint16{c.disk.Number},
		Commands: c.commands.Load(), BytesRead: c.bytesRead.Load(),
		BytesWritten: c.bytesWritten.Load()}, true
}

// Serve implements serving.Connection.
func (c *conn) Serve() {
	err := c.admit()
	if err == nil {
		err = c.messages()
	}
	c.end(err)
}

// admit lets the peer use the disk, if its user may and no other connection does.
func (c *conn) admit() error {
	if err := c.MayUse(c.srv.uids); err != nil {
		return err
	}
	if err := c.srv.conns.AwaitPenalty(&c.Conn); err != nil {
		return err
	}
	if err := c.srv.disks.Refusal(c.at.name, c.log()); err != nil {
		return fmt.Errorf("%w: %w", serving.ErrRefused, err)
	}
	if err := c.at.take(c); err != nil {
		return err
	}
	if err := c.srv.conns.Admit(&c.Arrival, c.at.name, false); err != nil {
		return errors.New("there are as many connections as the server may have")
	}
	c.share = c.srv.disks.Memory.Join(c.at.name)
	c.mu.Lock()
	c.client = c.srv.disks.AttachTo(c.disk, serving.Who{Name: c.at.name, Line: c})
	c.SetClient(c.client)
	c.mu.Unlock()
	if c.disk.Removed() { // its removal may not have seen this connection
		return serving.ErrRemoved
	}
	c.accepted = true
	c.srv.disks.Observer.LoginAccepted(serving.LoginEvent{Client: c.at.name, Remote: c.Remote(),
		Target: c.at.export})
	level := zap.InfoLevel
	if c.Slowed {
		level = zap.DebugLevel
	}
	c.log().Log(level, "vhost-user client")
	return nil
}

// messages executes the front end's messages until the connection ends.
func (c *conn) messages() (err error) {
	debug.SetPanicOnFault(true)
	defer func() {
		if p := recover(); p != nil {
			err = c.panicked(p)
		}
	}()
	_ = c.nc.SetReadDeadline(time.Now().Add(messageTime)) // the first message must come soon
	for {
		m, err := receive(c.nc)
		if err != nil {
			return err
		}
		err = c.handle(m)
		m.close()
		if err != nil {
			return err
		}
	}
}

// fail ends the connection because of err.
func (c *conn) fail(err error) {
	if c.Fail(err) {
		c.giveUp(nil)
	}
}

// hold notes that a request waits for far content. It returns false if the connection has ended.
func (c *conn) hold(run *run) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.Cause() != nil {
		return false
	}
	c.held[run] = struct{}{}
	if run.q.gaveUp {
		run.giveUp()
	}
	return true
}

func (c *conn) unhold(run *run) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.held, run)
	run.left = false
}

// hasLeft reports whether the request of run was given up because its ring stops.
func (c *conn) hasLeft(run *run) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return run.left
}

// giveUp ends the requests that wait for far content, of a queue that stops; nil: of all queues.
func (c *conn) giveUp(q *queue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if q != nil {
		q.gaveUp = q.stop.Load()
	}
	for run := range c.held {
		if q == nil || run.q == q {
			run.giveUp()
		}
	}
}

// giveUp ends the wait of its request. The caller holds conn.mu.
func (run *run) giveUp() {
	run.left = true
	run.r.Abort()
}

// letWait allows a queue's requests to wait for far content.
func (c *conn) letWait(q *queue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	q.stop.Store(false)
	q.gaveUp = false
	c.stopTime = c.srv.stopTimeout
}

// panicked returns why a goroutine of the connection has panicked. If memory was cut short, that is
// the front end's fault.
func (c *conn) panicked(p any) error {
	if fault, ok := p.(interface{ Addr() uintptr }); ok && fault.Addr() != 0 {
		return errFault
	}
	c.srv.disks.Observer.PanicCaught()
	c.log().Error("internal error: the vhost-user connection ends", zap.Any("panic", p),
		zap.ByteString("stack", debug.Stack()))
	return errors.New("internal error")
}

// end ends the connection. Its socket accepts the next one when nothing touches this guest's memory
// any more: a late read would reach memory that the guest uses for something else by then.
func (c *conn) end(err error) {
	c.fail(err)
	err = c.Cause()
	for _, q := range c.queues {
		if q != nil {
			q.close()
		}
	}
	c.table.release()
	c.region.close()
	c.dirty.replace(nil)
	c.setBack(-1)
	if c.client != nil {
		c.client.Detach()
		c.share.Part()
	}
	c.at.leave(c)
	c.srv.conns.Drop(c)
	c.tellEnd(err)
}

// tellEnd reports the end of the connection to the log and the observer.
func (c *conn) tellEnd(err error) {
	reason, expected := endOf(err)
	usual, how := zap.InfoLevel, serving.Failure
	switch {
	case reason == "connection_closed" && c.accepted:
		how = serving.EndedSince(c.since, c.commands.Load() > 0)
	case expected:
		how = serving.Expected
	}
	if !c.accepted {
		usual = zap.DebugLevel
	}
	level, more := c.srv.conns.Ended(&c.Conn, how, reason, usual)
	c.log().Log(level, "vhost-user connection ended",
		append(more, zap.String("reason", reason), zap.Error(err))...)
	switch {
	case c.accepted:
		c.srv.disks.Observer.SessionEnded(serving.SessionEvent{Client: c.at.name,
			Remote: c.Remote(), Reason: reason})
	case !expected:
		c.srv.disks.Observer.LoginRefused(serving.LoginEvent{Client: c.at.name,
			Remote: c.Remote(), Reason: "vhost_user_" + reason, Err: err})
	}
}

// endOf returns the reason of a connection's end for metrics, and whether the client or an operator
// wanted the end.
func endOf(err error) (reason string, expected bool) {
	switch {
	case serving.EndOf(err) != "":
		return serving.EndOf(err), true
	case errors.Is(err, errBusy):
		return "in_use", false
	case errors.Is(err, io.EOF), errors.Is(err, os.ErrDeadlineExceeded),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "connection_closed", true
	}
	return "protocol_error", false
}

// setBack sets the back channel; -1: none.
func (c *conn) setBack(fd int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	closeFD(c.backChannel)
	c.backChannel = fd
}

// resized tells the front end that the configuration has changed. It does not wait for the front
// end.
func (c *conn) resized() {
	b := binary.LittleEndian.AppendUint32(nil, backendConfigChange)
	b = binary.LittleEndian.AppendUint32(b, flagVersion)
	b = binary.LittleEndian.AppendUint32(b, 0)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.backChannel < 0 {
		return
	}
	err := unix.Sendmsg(c.backChannel, b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil && !c.toldBack { // a front end can cause this as often as it likes
		c.toldBack = true
		c.log().Warn("the guest does not learn that its disk has grown", zap.Error(err))
	}
}
