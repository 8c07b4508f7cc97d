package target

import (
	"encoding/hex"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/internal/login"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// Lock order in this package, outermost first:
//
//	Server.mu, session.mu, sender.mu
//
// No lock is held while a disk works or the network is read or written.

var (
	errReinstated   = errors.New("the initiator logged in again with the same session identifier")
	errPeerDead     = errors.New("the peer is silent and does not answer a ping")
	errPDUTimeout   = errors.New("the peer did not complete a PDU in time")
	errWriteTimeout = errors.New("the peer does not read what it is sent")
	errTargetReset  = errors.New("the target was reset")
	errNexusReset   = errors.New("the initiator has reset its session")
	errLoggedOut    = errors.New("logout")
	errBusy         = errors.New("no memory for the command's data")
	errSmallerSteps = errors.New("a read that waits holds too much memory")
	errTooManyTasks = errors.New("more immediate commands than can be held")
	errPanic        = socket.ErrPanic
)

// window is the command window of a session. Every PDU to the initiator carries its numbers (RFC
// 7143 4.2.2.1).
type window struct {
	exp atomic.Uint32 // ExpCmdSN: the number of the next command
	max atomic.Uint32 // MaxCmdSN: the last number that the initiator may use

	sentMax atomic.Uint32 // the last MaxCmdSN that the initiator got
}

func (w *window) numbers() (expCmdSN, maxCmdSN uint32) {
	// Read max first. It only grows, so it is never further ahead of an older ExpCmdSN than the
	// window is wide.
	maxCmdSN = w.max.Load()
	return w.exp.Load(), maxCmdSN
}

// sessionKey identifies a session: the I_T nexus (RFC 7143 4.4.3) without the portal group, which
// is the same for all.
type sessionKey struct {
	initiator string
	isid      [6]byte
}

// session is an I_T nexus with its one connection, from the end of the login to logout or loss. A
// discovery session has no nexus.
type session struct {
	conn   *conn
	key    sessionKey
	tsih   uint16
	cid    uint16 // of its one connection
	login  login.Result
	params login.Params // SendMaxDataSegment may change: the reader writes it, under mu
	nexus  *scsi.Nexus  // nil in a discovery session
	since  time.Time
	window window

	mu        sync.Mutex
	tasks     map[uint32]*task // guarded by mu; by initiator task tag
	counted   int              // guarded by mu; tasks in the command window
	immediate int              // guarded by mu; tasks outside the command window
	closed    bool             // guarded by mu
	closing   bool             // guarded by mu; the command window opens no further
	// guarded by mu; CmdSN plus 1 of the last request rejected in its turn; 0: none
	missed uint64
	free   []*task // guarded by mu
	width  int     // of the command window; set before the session is open

	held map[uint32]*heldPDU // by CmdSN; only the reader uses it
	// CmdSNs of rejected requests, until another request uses them; only the reader uses it
	refused map[uint32]struct{}
	waiting []*pdu.TaskManagementRequest // they wait for earlier commands; only the reader uses it

	counts bool // guarded by Server.mu; the session has a window, and a place of the entrance

	work sessionWork

	open  atomic.Bool // the login response is queued: others may send, too
	ended sync.Once
}

// extended reports whether the features of RFC 7144 may be used (4.1).
func (s *session) extended() bool { return s.params.ProtocolLevel >= login.LevelRFC7144 }

func (s *session) discovery() bool { return s.nexus == nil }

// describe is the session for the status page.
func (s *session) describe() status.Session {
	n, waiting := s.taskCounts()
	used := []uint16{}
	if s.nexus != nil {
		used = s.nexus.Uses()
	}
	return status.Session{
		LUNs:         used,
		Commands:     s.work.commands.Load(),
		BytesRead:    s.work.read.Load(),
		BytesWritten: s.work.written.Load(),
		Initiator:    s.login.InitiatorName,
		Alias:        s.login.InitiatorAlias,
		Remote:       s.conn.remote.String(),
		Local:        s.conn.local.String(),
		User:         s.login.User,
		ISID:         hex.EncodeToString(s.key.isid[:]),
		TSIH:         s.tsih,
		Discovery:    s.discovery(),
		Since:        s.since,
		InFlight:     n,
		Waiting:      waiting,
		HeaderDigest: s.params.HeaderDigest,
		DataDigest:   s.params.DataDigest,
	}
}

// taskCounts returns how many commands the session has in flight, and how many of these wait for
// far content.
func (s *session) taskCounts() (inFlight, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if t.scsi.Waiting() {
			waiting++
		}
	}
	return len(s.tasks), waiting
}

// sessionWork counts the work of a session.
type sessionWork struct{ commands, read, written atomic.Uint64 }

func (w *sessionWork) count(op serving.Operation, moved int64) {
	w.commands.Add(1)
	switch op {
	case serving.OpRead:
		w.read.Add(uint64(moved))
	case serving.OpWrite:
		w.written.Add(uint64(moved))
	}
}

// admission is what to do with a PDU, by its CmdSN.
type admission uint8

const (
	admitNow   admission = iota // its turn
	admitLater                  // in the window, but numbers before it are missing
	admitNever                  // outside the window or a duplicate: ignored (RFC 7143 4.2.2.1)
)

// admit decides on a PDU with a CmdSN. The reader calls it.
func (s *session) admit(cmdSN uint32, immediate bool) admission {
	exp, limit := s.window.numbers()
	switch {
	case immediate:
		// An immediate PDU carries the number of the next command but does not use it up. If it has
		// another number, it is executed anyway: the number has no meaning.
		return admitNow
	case pdu.SNLess(limit, cmdSN):
		return admitNever // the window is closed
	case !pdu.SNLess(cmdSN, exp):
		for exp != cmdSN && s.passRejected(exp) {
			exp++
		}
		if exp == cmdSN {
			return admitNow
		}
		return admitLater
	}
	if _, ok := s.refused[cmdSN]; ok {
		return admitNow
	}
	return admitNever
}

// passRejected advances ExpCmdSN over a rejected request if the initiator has gone on without it.
func (s *session) passRejected(exp uint32) bool {
	_, ok := s.refused[exp]
	if ok {
		s.window.exp.Store(exp + 1)
		s.reopen()
	}
	return ok
}

// received advances ExpCmdSN over a request that was admitted and not rejected, before anything
// answers it.
func (s *session) received(cmdSN uint32, immediate bool) {
	if immediate {
		return
	}
	if len(s.refused) > 0 {
		delete(s.refused, cmdSN)
	}
	if s.window.exp.Load() == cmdSN {
		s.window.exp.Store(cmdSN + 1)
	}
}

// refuse notes that a request was rejected. Its number does not count as received, and the
// initiator may use it again (RFC 7143 7.3). By the standard, later requests would have to wait
// until it does. But Linux and libiscsi go on without filling the gap, so later requests do not
// wait here.
func (s *session) refuse(cmdSN uint32) {
	if s.refused == nil {
		s.refused = make(map[uint32]struct{})
	}
	if len(s.refused) >= s.width {
		exp := s.window.exp.Load()
		for sn := range s.refused {
			if pdu.SNLess(sn, exp) {
				delete(s.refused, sn)
			}
		}
	}
	s.refused[cmdSN] = struct{}{}
	if s.window.exp.Load() == cmdSN {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.missed = uint64(cmdSN) + 1
		s.reopenLocked()
	}
}

// reopen calls reopenLocked with the lock.
func (s *session) reopen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reopenLocked()
}

// reopenLocked advances MaxCmdSN as commands and other requests end. By the standard it never
// decreases.
func (s *session) reopenLocked() {
	if s.closing {
		return
	}
	exp := s.window.exp.Load()
	limit := exp - 1 + uint32(s.width-s.counted)
	if uint64(exp)+1 == s.missed {
		// An initiator that goes on without the rejected request needs room for the next one, also
		// in a window of one.
		limit++
	}
	if pdu.SNLess(s.window.max.Load(), limit) {
		s.window.max.Store(limit)
	}
}

// tellLocked tells an initiator whose command window was used up that the window is open again,
// after a command ended without an answer (RFC 7143 11.19). If no other command is in flight, the
// initiator would otherwise wait for the next ping.
func (s *session) tellLocked() {
	limit := s.window.max.Load()
	if told := s.window.sentMax.Load(); s.closed || limit == told || s.window.exp.Load() != told+1 {
		return
	}
	s.window.sentMax.Store(limit)
	s.conn.sendSoon(&pdu.NOPIn{TaskTag: pdu.ReservedTag, TransferTag: pdu.ReservedTag}, snPeek)
}

// closeWindow stops MaxCmdSN: the initiator may use the rest of its window, and no more.
func (s *session) closeWindow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closing = true
}

// end ends the session and closes its connection, which ends the reader.
func (s *session) end(cause error) {
	s.conn.fail(cause)
	s.leave(cause)
}

// leave ends the session, once: its tasks end without an answer, and its nexus is lost. Disk calls
// in progress go on, and Shutdown waits for them.
func (s *session) leave(cause error) {
	s.ended.Do(func() {
		defer s.conn.logEnd(s, cause)
		defer s.conn.srv.remove(s)
		s.close()
		if s.nexus != nil {
			s.conn.srv.device.Detach(s.nexus)
		}
	})
}

// close ends all tasks without an answer, and refuses tasks that would wait for data.
func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, t := range s.tasks {
		s.abortLocked(t)
	}
	s.dropFreeLocked()
}

// trim gives back memory that the session keeps for its next commands and answers.
func (s *session) trim() {
	s.mu.Lock()
	s.dropFreeLocked()
	s.mu.Unlock()
	s.conn.tx.Trim()
}

func (s *session) dropFreeLocked() {
	for range s.free {
		s.releaseTask()
	}
	s.free = nil
}

// releaseTask stops counting a task that no command will use any more.
func (s *session) releaseTask() { s.conn.srv.pool.Charge(-memory.RequestCost) }

// handleLogout ends the session. Closing its only connection ends it, too (RFC 7143 11.14).
func (c *conn) handleLogout(h *pdu.Header, seg *segment) error {
	var p pdu.LogoutRequest
	if err := p.Decode(h); err != nil {
		return c.malformed(err)
	}
	if ok, err := c.admit(h, seg); !ok {
		return err
	}
	if err := seg.discard(); err != nil {
		return c.badData(h, err)
	}
	if c.session().discovery() && p.Reason != pdu.LogoutCloseSession {
		c.rejectRequest(pdu.RejectProtocolError, h) // RFC 7143 4.3
		return nil
	}
	resp := pdu.LogoutResponse{TaskTag: p.TaskTag}
	switch p.Reason {
	case pdu.LogoutCloseSession:
	case pdu.LogoutCloseConnection:
		if p.CID != c.session().cid {
			resp.Response = pdu.LogoutCIDNotFound
		}
	case pdu.LogoutRemoveConnection:
		// Recovery of a connection belongs to error recovery level 2.
		resp.Response = pdu.LogoutRecoveryNotSupported
	default:
		return c.refuse(pdu.RejectInvalidPDUField, seg)
	}
	c.received(h)
	if resp.Response == pdu.LogoutSuccess {
		c.session().abortAll()
		c.detach()
	}
	c.tx.send(&resp, snAdvance, nil, nil)
	if resp.Response == pdu.LogoutSuccess {
		return errLoggedOut
	}
	return nil
}

// detach ends the session's nexus before the initiator learns that the session has ended. The
// initiator may log in again at once, and its old reservations and claims must not block it.
func (c *conn) detach() {
	if sess := c.session(); sess.nexus != nil {
		c.srv.device.Detach(sess.nexus)
	}
}
