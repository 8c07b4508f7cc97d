package target

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/internal/pdu"
)

// conn is one TCP connection, from accept to close.
type conn struct {
	serving.Conn
	srv *Server
	rx  receiver
	tx  sender

	local, remote net.Addr
	share         *memory.Share // share of the address; set before the session is registered

	sess atomic.Pointer[session] // set at the end of login

	role *serving.Reader      // set before the session is registered
	late *serving.Late[*task] // reads that wait for storage; set before the session is registered
	// slowSince is when the reader got the first command that keeps a processor busy, since it last
	// waited for the network; as time since the server's start; 0: none. Only the reader uses it.
	slowSince time.Duration

	tags atomic.Uint32 // the last target transfer tag
	ping pinger
	text textExchange // only the reader uses it
	// textHeld is how many bytes text counts for in the limit of memory; only the reader uses it.
	textHeld int64
}

func (s *Server) newConn(nc net.Conn) *conn {
	c := &conn{srv: s, local: nc.LocalAddr(), remote: nc.RemoteAddr()}
	c.Init(nc)
	w := &socket.Plain{Conn: nc}
	c.rx.BeforeWait, c.rx.BeforeMore = c.beforeWait, c.beforeMore
	c.rx.init(w, &s.clock)
	c.tx.init(w, &s.clock, &window{}, s.pool)
	return c
}

// beforeWait is called before the reader waits for the network.
func (c *conn) beforeWait() error {
	c.slowSince = 0
	return c.tx.Flush()
}

// beforeMore is called before the reader reads more of what has arrived.
func (c *conn) beforeMore() error { return c.tx.Relieve(c.flushAt()) }

// flushAt is how many bytes the reader leaves in the queue while it has more commands.
func (c *conn) flushAt() int {
	if c.srv.working.Load() > 1 {
		return flushBeside
	}
	return flushAlone
}

func (c *conn) session() *session { return c.sess.Load() }

func (c *conn) log() *zap.Logger {
	return c.srv.log.With(zap.String("remote", c.remote.String()))
}

// End implements serving.Connection.
func (c *conn) End(err error) {
	c.fail(err)
	if sess := c.session(); sess != nil {
		sess.leave(c.Cause())
	}
}

// Session implements serving.Connection.
func (c *conn) Session() (status.Session, bool) {
	sess := c.session()
	if sess == nil || !c.srv.registered(sess) {
		return status.Session{}, false
	}
	return sess.describe(), true
}

// Serve implements serving.Connection: login, then full feature phase.
func (c *conn) Serve() {
	if !c.loginPhase() {
		c.close()
		return
	}
	c.role.Run()
}

// loginPhase runs the login and reports whether it reached full feature phase.
func (c *conn) loginPhase() (ok bool) {
	defer c.recoverPanic()
	c.SetDeadline(time.Now().Add(c.srv.opt.Limits.LoginTimeout))
	if !c.runLogin() {
		return false
	}
	c.SetDeadline(time.Time{})
	return true
}

// runner is a goroutine that executes a connection's commands. While Reading is set, it is the
// reader. After it has lost the reading role, it only finishes its current command.
type runner struct {
	*serving.Turn
	conn   *conn
	queued int            // weight of the queue after its last response; see Sender.WeightLocked
	task   *task          // its current or last command; see ownsLocked
	buf    *memory.Buffer // filled by a read, but not queued yet
	// single says that the command is a read of one piece, which may be postponed
	single bool
	late   bool // the command was postponed
}

// readLoop is the main loop of the reading goroutine in full feature phase.
func (c *conn) readLoop(turn *serving.Turn) {
	run := &runner{Turn: turn, conn: c}
	defer c.recoverRunner(run)
	for {
		err := c.step(run)
		if !run.Reading {
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

// finish ends the session and the connection. The reader calls it.
func (c *conn) finish(err error) {
	parting := err == errLoggedOut || err == errTargetReset || err == errNexusReset ||
		errors.As(err, new(*fatalError))
	if parting {
		c.tx.Drain() // the peer must get its last response: to a logout or reset, or a Reject
	}
	if cause := c.Cause(); cause != nil {
		err = cause // this side closed the connection; the read error is only a consequence
	}
	c.session().leave(err)
	c.releaseReader()
	if parting {
		c.linger()
	}
	c.close()
}

// releaseReader gives back the reader's memory when nothing is read any more.
func (c *conn) releaseReader() {
	sess := c.session()
	for sn, h := range sess.held {
		delete(sess.held, sn)
		h.release()
	}
	c.text = textExchange{}
	c.countText()
	c.rx.release()
}

// linger waits until the peer has closed the connection: if we closed first, a reset could destroy
// the last response.
func (c *conn) linger() {
	nc := c.Network()
	if cw, ok := nc.(interface{ CloseWrite() error }); ok && cw.CloseWrite() == nil {
		_ = nc.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.CopyN(io.Discard, nc, 1<<20)
	}
}

// fail closes the network side because of err. The reader then ends the session.
func (c *conn) fail(err error) { c.Fail(err) }

// takeSocket takes a session's connection away from Go's poller. If that is impossible, the
// connection works as before, only slower. Nobody else may use the connection yet, except to close
// it.
func (c *conn) takeSocket() {
	w, err := c.TakeSocket(&c.srv.pollers)
	if err != nil {
		c.log().Debug("the connection stays with Go's poller", zap.Error(err))
		return
	}
	c.SetDeadline(time.Now().Add(c.srv.opt.Limits.LoginTimeout)) // the rest of the login's time
	c.rx.Wire, c.tx.Wire = w, w
}

func (c *conn) close() {
	c.fail(net.ErrClosed)
	c.tx.Close() // the write fails and frees the queue
	c.srv.drop(c)
}

// fatalError is a protocol error after which the session cannot go on (RFC 7143 7.7).
type fatalError struct{ why string }

func (e *fatalError) Error() string { return "protocol error: " + e.why }

func fatalf(format string, args ...any) error {
	return &fatalError{why: fmt.Sprintf(format, args...)}
}

// failed counts a failure of the peer, see serving.Connections.Failed.
func (c *conn) failed(reason string) (more []zap.Field, say bool) {
	return c.srv.conns.Failed(c.Source, reason)
}

// step reads and handles one PDU.
func (c *conn) step(run *runner) error {
	if err := c.replay(run); err != nil || !run.Reading {
		return err
	}
	err := c.late.Await(run.Turn, c.rx.Ready, func(t *task) error { return c.executeLate(run, t) })
	if err != nil || !run.Reading {
		return err
	}
	ahs, err := c.rx.next()
	if err != nil {
		return err
	}
	h := &c.rx.hdr
	if n := h.DataLen(); n > c.session().params.RecvMaxDataSegment {
		c.reject(pdu.RejectProtocolError)
		return fatalf("a data segment of %d bytes, over the declared limit of %d", n,
			c.session().params.RecvMaxDataSegment)
	}
	if err := pdu.CheckAHS(ahs); err != nil {
		return c.malformed(err)
	}
	return c.dispatch(run, h, &c.rx.data)
}

// dispatch handles one PDU in full feature phase. If run.Reading is still set when it returns, the
// data segment is consumed.
func (c *conn) dispatch(run *runner, h *pdu.Header, seg *segment) error {
	if c.Cause() != nil {
		// the session has ended, for example by reinstatement: drop its PDUs
		return net.ErrClosed
	}
	sess := c.session()
	switch op := h.Opcode(); op {
	case pdu.OpSCSICommand:
		if sess.discovery() {
			break
		}
		return c.handleSCSICommand(run, h, seg)
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
		if ok, err := c.admit(h, seg); !ok {
			return err
		}
	}
	return c.refuse(pdu.RejectProtocolError, seg) // not in a discovery session (RFC 7143 4.3)
}

// reject answers the current PDU with a Reject that has its header (RFC 7143 11.17).
func (c *conn) reject(reason pdu.RejectReason) { c.rejectHeader(reason, &c.rx.hdr) }

func (c *conn) rejectHeader(reason pdu.RejectReason, h *pdu.Header) {
	c.srv.opt.Disks.Observer.MessageRejected(reason.String())
	b := c.srv.pool.Must(pdu.HeaderLen)
	copy(b.B, h[:])
	c.tx.send(&pdu.Reject{Reason: reason, DataLen: pdu.HeaderLen}, snAdvance, b.B, b)
}

// rejectRequest rejects a request. If it is numbered, its CmdSN is not used up.
func (c *conn) rejectRequest(reason pdu.RejectReason, h *pdu.Header) {
	if h.Numbered() {
		c.session().refuse(h.CmdSN())
	}
	c.rejectHeader(reason, h)
}

// refuse rejects the current PDU and drops its data, so that framing survives.
func (c *conn) refuse(reason pdu.RejectReason, seg *segment) error {
	c.rejectRequest(reason, &c.rx.hdr)
	err := seg.discard()
	if errors.Is(err, errDataDigest) {
		return nil
	}
	return err
}

// malformed ends the session because of a header that the standard forbids in any session (RFC 7143
// 7.7). It sends a Reject first, so that the initiator can see the reason.
func (c *conn) malformed(err error) error {
	c.reject(pdu.RejectInvalidPDUField)
	return fatalf("%v", err)
}

// badData handles an error from reading a PDU's data. After a wrong digest it rejects the PDU and
// the connection goes on (RFC 7143 7.8). It returns any other error.
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

// admit reports whether to handle a request now. If so, the caller calls received or rejects the
// request. If not, admit has dropped the request or holds it until its turn.
func (c *conn) admit(h *pdu.Header, seg *segment) (bool, error) {
	switch c.session().admit(h.CmdSN(), h.Immediate()) {
	case admitNow:
		return true, nil
	case admitLater:
		return false, c.hold(h, seg)
	}
	return false, c.ignore(seg)
}

// received notes that an admitted request other than a SCSI command was received. Such a request
// ends when it has been handled. It takes no place in the command window.
func (c *conn) received(h *pdu.Header) {
	sess := c.session()
	sess.received(h.CmdSN(), h.Immediate())
	if !h.Immediate() {
		sess.reopen()
	}
}

// nextTag returns a new target transfer tag.
func (c *conn) nextTag() uint32 {
	for {
		if tag := c.tags.Add(1); tag != pdu.ReservedTag {
			return tag
		}
	}
}
