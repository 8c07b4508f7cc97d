package target

import (
	"container/list"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/target/internal/pdu"
)

// conn is one TCP connection, from accept to close.
type conn struct {
	srv *Server
	rx  receiver
	tx  sender

	local, remote net.Addr
	netMu         sync.Mutex
	nc            net.Conn // guarded by netMu but for the reader, which alone replaces it

	source  netip.Addr
	pending *list.Element // guarded by Server.mu; nil: logged in, or pushed out
	began   atomic.Bool   // a Login Request has arrived
	gone    chan struct{} // closed with the network side

	sess atomic.Pointer[session] // set at the end of login

	// busy is the number of the disk call that the reader is in, or 0; see handoff.go.
	busy  atomic.Uint64
	calls uint64 // how many there were; belongs to the reader
	// reader is who has the reading role. It is read while busy tells that the reader is in a call.
	reader *runner
	// slowSince is when the reader met the first command since it last waited that keeps a processor busy, since the server's start;
	// 0: none. It belongs to the reader.
	slowSince time.Duration
	watched   uint64 // belongs to the watchdog

	tags atomic.Uint32 // the last target transfer tag
	ping pinger
	text textExchange // belongs to the reader
	// textHeld is what text counts for in the limit of memory, bytes; belongs to the reader.
	textHeld int64

	closeOnce sync.Once
	cause     atomic.Pointer[error] // why fail was called
}

func newConn(s *Server, nc net.Conn) *conn {
	c := &conn{srv: s, nc: nc, local: nc.LocalAddr(), remote: nc.RemoteAddr(), source: sourceOf(nc), gone: make(chan struct{})}
	w := &plainWire{Conn: nc}
	c.rx = receiver{buf: make([]byte, loginBuffer), beforeWait: c.beforeWait, beforeMore: c.tx.relieve, clock: &s.clock, wire: w}
	c.tx.init(w, &s.clock, &window{}, &s.pool)
	return c
}

// beforeWait runs before the reader waits for the network.
func (c *conn) beforeWait() error {
	c.slowSince = 0
	return c.tx.flush()
}

func (c *conn) session() *session { return c.sess.Load() }

func (c *conn) log() *zap.Logger {
	return c.srv.log.With(zap.String("remote", c.remote.String()))
}

// serve runs the connection: login, then full feature phase.
func (c *conn) serve() {
	defer c.srv.wg.Done()
	if c.loginPhase() {
		c.readLoop()
		return
	}
	c.close()
}

// loginPhase runs the login and says whether it reached full feature phase.
func (c *conn) loginPhase() (ok bool) {
	defer c.recoverPanic()
	_ = c.nc.SetDeadline(time.Now().Add(c.srv.opt.Limits.LoginTimeout))
	if !c.runLogin() {
		return false
	}
	_ = c.nc.SetDeadline(time.Time{})
	return true
}

// runner is a goroutine that executes a connection's commands. While reading is set it owns the receive
// side; once the watchdog has taken that away, it only finishes the command in hand.
type runner struct {
	conn    *conn
	reading bool
	call    uint64      // number of the disk call that it is in as the reader; 0: none
	lun     *lunWatch   // where that call is, or was
	lost    atomic.Bool // the reading role, over the command in hand: it is in the disk, or was
	passed  *lunWatch   // where its command was passed on because the disk is slow
	queued  int         // what waited for the network when it queued last; see sender.weightLocked
	task    *task       // the one in hand, or one before it; see ownedLocked
	buf     *buffer     // read into, and not queued yet
}

// readLoop is the body of the reading goroutine in full feature phase.
func (c *conn) readLoop() {
	run := &runner{conn: c, reading: true}
	c.reader = run
	defer c.recoverRunner(run)
	for {
		err := c.step(run)
		if !run.reading {
			c.ended(run)
			if err != nil {
				c.fail(err)
			}
			return
		}
		if err != nil {
			c.finish(err)
			return
		}
	}
}

// finish ends the session and the connection, from the reader.
func (c *conn) finish(err error) {
	parting := err == errLoggedOut || err == errTargetReset || err == errNexusReset || errors.As(err, new(*fatalError))
	if parting {
		c.tx.drain() // the peer is owed a last response: to its logout or reset, or a Reject
	}
	if cause := c.cause.Load(); cause != nil {
		err = *cause // the connection was closed from our side, and the read error is only its echo
	}
	c.session().leave(err)
	c.releaseReader()
	if parting {
		c.linger()
	}
	c.close()
}

// releaseReader gives back what belongs to the reader, when nothing is read any more.
func (c *conn) releaseReader() {
	sess := c.session()
	for sn, h := range sess.held {
		delete(sess.held, sn)
		h.release()
	}
	c.text = textExchange{}
	c.countText()
	c.rx.release(&c.srv.pool)
}

// linger lets the peer close first, so that the last response is not lost to a reset of the connection.
func (c *conn) linger() {
	if cw, ok := c.nc.(interface{ CloseWrite() error }); ok && cw.CloseWrite() == nil {
		_ = c.nc.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.CopyN(io.Discard, c.nc, 1<<20)
	}
}

// fail closes the network side because of err. The reader, wherever it is, then ends the session.
func (c *conn) fail(err error) {
	if c.cause.CompareAndSwap(nil, &err) {
		c.closeNetwork()
	}
}

func (c *conn) closeNetwork() {
	c.closeOnce.Do(func() {
		close(c.gone)
		c.netMu.Lock()
		defer c.netMu.Unlock()
		_ = c.nc.Close()
	})
}

// takeSocket takes the connection of a session out of the hands of Go's poller. Where that is not possible it stays there, and
// works as well, if slower. Nobody else may use the connection yet, but close it.
func (c *conn) takeSocket() {
	s, err := newSocket(c.nc)
	if err != nil {
		c.log().Debug("the connection stays with Go's poller", zap.Error(err))
		return
	}
	_ = s.SetDeadline(time.Now().Add(c.srv.opt.Limits.LoginTimeout)) // what is left of the login
	c.netMu.Lock()
	defer c.netMu.Unlock()
	_ = c.nc.Close()
	c.nc, c.rx.wire, c.tx.wire = s, s, s
	select {
	case <-c.gone:
		_ = s.Close()
	default:
	}
}

func (c *conn) close() {
	c.closeNetwork()
	c.tx.close() // fails to write, and frees what was queued
	c.srv.drop(c)
}

// fatalError is a protocol error after which the session cannot go on (RFC 7143 7.7).
type fatalError struct{ why string }

func (e *fatalError) Error() string { return "protocol error: " + e.why }

func fatalf(format string, args ...any) error { return &fatalError{why: fmt.Sprintf(format, args...)} }

// step reads one PDU and handles it.
func (c *conn) step(run *runner) error {
	if err := c.replay(run); err != nil || !run.reading {
		return err
	}
	ahs, err := c.rx.next()
	if err != nil {
		return err
	}
	h := &c.rx.hdr
	if n := h.DataLen(); n > c.session().params.RecvMaxDataSegment {
		c.reject(pdu.RejectProtocolError)
		return fatalf("a data segment of %d bytes, over the declared limit of %d", n, c.session().params.RecvMaxDataSegment)
	}
	return c.dispatch(run, h, ahs, &c.rx.data)
}

// dispatch handles one PDU of full feature phase. Its data segment is consumed when it returns with
// run.reading still set.
func (c *conn) dispatch(run *runner, h *pdu.Header, ahs []byte, seg *segment) error {
	if c.cause.Load() != nil {
		return net.ErrClosed // what was received before the session was ended, as by its reinstatement, counts no longer
	}
	sess := c.session()
	switch op := h.Opcode(); op {
	case pdu.OpSCSICommand:
		if sess.discovery() {
			break
		}
		return c.handleSCSICommand(run, h, ahs, seg)
	case pdu.OpDataOut:
		if sess.discovery() {
			break
		}
		return c.handleDataOut(run, h, seg)
	case pdu.OpNOPOut:
		if sess.discovery() {
			break
		}
		return c.handleNOPOut(h, seg)
	case pdu.OpTaskManagementRequest:
		if sess.discovery() {
			break
		}
		return c.handleTaskManagement(h, seg)
	case pdu.OpTextRequest:
		return c.handleText(h, seg)
	case pdu.OpLogoutRequest:
		return c.handleLogout(h, seg)
	case pdu.OpSNACKRequest:
		// Error recovery level 0 retransmits nothing (RFC 7143 11.16).
		return c.refuse(pdu.RejectSNACK, seg)
	case pdu.OpLoginRequest:
		c.reject(pdu.RejectProtocolError)
		return fatalf("a Login Request in full feature phase")
	default:
		if err := c.refuse(pdu.RejectNotSupported, seg); err != nil {
			return err
		}
		return fatalf("opcode %v is not one of an initiator", op)
	}
	if h.Numbered() {
		if ok, err := c.admit(h, ahs, seg); !ok {
			return err
		}
	}
	return c.refuse(pdu.RejectProtocolError, seg) // not in a discovery session (RFC 7143 4.3)
}

// reject answers the PDU in hand with a Reject that carries its header (RFC 7143 11.17).
func (c *conn) reject(reason pdu.RejectReason) { c.rejectHeader(reason, &c.rx.hdr) }

func (c *conn) rejectHeader(reason pdu.RejectReason, h *pdu.Header) {
	c.srv.opt.Observer.PDURejected(reason.String())
	b := c.srv.pool.must(pdu.HeaderLen)
	copy(b.b, h[:])
	c.tx.send(&pdu.Reject{Reason: reason, DataLen: pdu.HeaderLen}, snAdvance, b.b, b)
}

// rejectRequest rejects a PDU for good: where it is numbered, its CmdSN has not been used up.
func (c *conn) rejectRequest(reason pdu.RejectReason, h *pdu.Header) {
	if h.Numbered() {
		c.session().refuse(h.CmdSN())
	}
	c.rejectHeader(reason, h)
}

// refuse rejects the PDU in hand and drops its data, so that framing survives.
func (c *conn) refuse(reason pdu.RejectReason, seg *segment) error {
	c.rejectRequest(reason, &c.rx.hdr)
	err := seg.discard()
	if errors.Is(err, errDataDigest) {
		return nil
	}
	return err
}

// malformed ends the session because of a header that the standard forbids in any session (RFC 7143 7.7), after a
// Reject by which its sender can see what it was.
func (c *conn) malformed(err error) error {
	c.reject(pdu.RejectInvalidPDUField)
	return fatalf("%v", err)
}

// badData handles the error of reading a PDU's data: a wrong digest rejects the PDU and the connection
// goes on (RFC 7143 7.8); anything else is passed on.
func (c *conn) badData(h *pdu.Header, err error) error {
	if errors.Is(err, errDataDigest) {
		c.rejectRequest(pdu.RejectDataDigest, h)
		return nil
	}
	if errors.Is(err, errBusy) {
		c.rejectRequest(pdu.RejectLongOperation, h)
		return nil
	}
	return err
}

// admit says whether a request is to be handled now; it is then either received or rejected. If not, it has been dropped, or held until
// its turn.
func (c *conn) admit(h *pdu.Header, ahs []byte, seg *segment) (bool, error) {
	switch c.session().admit(h.CmdSN(), h.Immediate()) {
	case admitNow:
		return true, nil
	case admitLater:
		return false, c.hold(h, ahs, seg)
	}
	return false, c.ignore(seg)
}

// received takes a request other than a SCSI command that was admitted: it is over when it has been handled, and keeps no place in
// the command window.
func (c *conn) received(h *pdu.Header) {
	sess := c.session()
	sess.received(h.CmdSN(), h.Immediate())
	if !h.Immediate() {
		sess.reopen()
	}
}

// nextTag is a fresh target transfer tag.
func (c *conn) nextTag() uint32 {
	for {
		if tag := c.tags.Add(1); tag != pdu.ReservedTag {
			return tag
		}
	}
}
