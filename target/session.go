package target

import (
	"encoding/hex"
	"errors"
	"sync"
	"sync/atomic"
	"time"

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
	errShutdown     = errors.New("the server is shutting down")
	errPeerDead     = errors.New("the peer is silent and does not answer a ping")
	errPDUTimeout   = errors.New("the peer did not complete a PDU in time")
	errWriteTimeout = errors.New("the peer does not read what it is sent")
	errTargetReset  = errors.New("the target was reset")
	errNexusReset   = errors.New("the initiator has reset its session")
	errKicked       = errors.New("the session was ended by an operator")
	errLoggedOut    = errors.New("logout")
	errBusy         = errors.New("no memory for the command's data")
	errSmallerSteps = errors.New("a read that waits holds too much memory")
	errTooManyTasks = errors.New("more immediate commands than can be held")
	errPanic        = errors.New("internal error")
)

// window is the command window of a session: the numbers that every PDU to the initiator carries
// (RFC 7143 4.2.2.1).
type window struct {
	exp atomic.Uint32 // ExpCmdSN: the number of the next command
	max atomic.Uint32 // MaxCmdSN: the last number that the initiator may use

	told atomic.Uint32 // MaxCmdSN as the initiator knows it
}

func (w *window) numbers() (expCmdSN, maxCmdSN uint32) {
	// max is read first: it only grows, and so never runs ahead of an older ExpCmdSN by more than the window.
	maxCmdSN = w.max.Load()
	return w.exp.Load(), maxCmdSN
}

// sessionKey names a session from the initiator's side: the I_T nexus (RFC 7143 4.4.3). The portal group is
// the same for all.
type sessionKey struct {
	initiator string
	isid      [6]byte
}

// session is an I_T nexus with its one connection, from the end of login to logout or loss. A discovery
// session has no nexus.
type session struct {
	conn   *conn
	key    sessionKey
	tsih   uint16
	cid    uint16 // of its one connection
	login  login.Result
	params login.Params // of these, SendMaxDataSegment may change: written by the reader, under mu
	nexus  *scsi.Nexus  // nil in a discovery session
	since  time.Time
	window window

	mu        sync.Mutex
	tasks     map[uint32]*task // guarded by mu; by initiator task tag
	counted   int              // guarded by mu; tasks that take a place in the command window
	immediate int              // guarded by mu; tasks that take none
	closed    bool             // guarded by mu
	closing   bool             // guarded by mu; the command window opens no further
	missed    uint64           // guarded by mu; CmdSN of the request that was last rejected in its turn, plus 1; 0: none
	free      []*task          // guarded by mu
	width     int              // of the command window; set before it is open

	held    map[uint32]*heldPDU          // by CmdSN; belongs to the reader
	refused map[uint32]struct{}          // CmdSNs of rejected requests, while nothing else has them; belongs to the reader
	waiting []*pdu.TaskManagementRequest // for the commands before them; belongs to the reader

	counts bool // guarded by Server.mu; it is counted in Server.from

	// impatient says that the initiator has aborted a command that was held: see patience.
	impatient atomic.Bool

	work sessionWork

	open  atomic.Bool // the login response is queued: others may send on the connection
	ended sync.Once
}

// extended reports whether the features of RFC 7144 may be used (4.1).
func (s *session) extended() bool { return s.params.ProtocolLevel >= login.LevelRFC7144 }

func (s *session) discovery() bool { return s.nexus == nil }

// info describes the session for the status page.
func (s *session) info() SessionInfo {
	n, waiting := s.load()
	used := []uint16{}
	if s.nexus != nil {
		used = s.conn.srv.device.UsedBy(s.nexus)
	}
	return SessionInfo{
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

// load is how many commands the session has in flight, and how many of these wait for content that
// lies far away.
func (s *session) load() (inFlight, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if t.scsi.Waiting() {
			waiting++
		}
	}
	return len(s.tasks), waiting
}

// SessionInfo describes a session in full feature phase.
type SessionInfo struct {
	Initiator    string    `json:"initiator"`
	Alias        string    `json:"alias,omitempty"`
	Remote       string    `json:"remote"`
	Local        string    `json:"local"`
	User         string    `json:"user,omitempty"` // the CHAP name
	ISID         string    `json:"isid"`           // 12 hexadecimal digits
	TSIH         uint16    `json:"tsih"`
	Discovery    bool      `json:"discovery"`
	Since        time.Time `json:"since"`
	InFlight     int       `json:"in_flight"`         // commands
	Waiting      int       `json:"waiting,omitempty"` // of these, for content that lies far away
	HeaderDigest bool      `json:"header_digest"`
	DataDigest   bool      `json:"data_digest"`
	LUNs         []uint16  `json:"luns"`     // that it has read or written
	Commands     uint64    `json:"commands"` // that have come to their end
	BytesRead    uint64    `json:"bytes_read"`
	BytesWritten uint64    `json:"bytes_written"`
}

// sessionWork is what a session has done.
type sessionWork struct{ commands, read, written atomic.Uint64 }

func (w *sessionWork) count(op scsi.Operation, moved int64) {
	w.commands.Add(1)
	switch op {
	case scsi.OpRead:
		w.read.Add(uint64(moved))
	case scsi.OpWrite:
		w.written.Add(uint64(moved))
	}
}

// admission is what becomes of a PDU by its CmdSN.
type admission uint8

const (
	admitNow   admission = iota // its turn
	admitLater                  // in the window, but numbers before it are missing
	admitNever                  // outside the window or seen before: ignored (RFC 7143 4.2.2.1)
)

// admit decides on a PDU that carries CmdSN. Called by the reader.
func (s *session) admit(cmdSN uint32, immediate bool) admission {
	exp, limit := s.window.numbers()
	switch {
	case immediate:
		// An immediate PDU carries the number of the next command, and does not use it up. One with
		// another number is still executed: the number has no meaning for it.
		return admitNow
	case pdu.SNLess(limit, cmdSN):
		return admitNever // the window is closed, if it is its turn
	case !pdu.SNLess(cmdSN, exp):
		for exp != cmdSN && s.pass(exp) {
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

// pass advances ExpCmdSN over a request that was rejected, when the initiator has gone on without it.
func (s *session) pass(exp uint32) bool {
	_, ok := s.refused[exp]
	if ok {
		s.window.exp.Store(exp + 1)
		s.reopen()
	}
	return ok
}

// received advances ExpCmdSN over a request that was admitted and is not rejected, before anything answers it.
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

// refuse notes that a request was rejected. Its number does not count as received, and is for the initiator to use again (RFC 7143
// 7.3). Initiators that go on without it are not held up, as the standard has it: Linux and libiscsi do, and fill no gap.
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

// reopen is reopenLocked for whoever does not hold the lock.
func (s *session) reopen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reopenLocked()
}

// reopenLocked moves MaxCmdSN on as commands end, and requests that are no commands. It never goes back, as the standard wants.
func (s *session) reopenLocked() {
	if s.closing {
		return
	}
	exp := s.window.exp.Load()
	limit := exp - 1 + uint32(s.width-s.counted)
	if uint64(exp)+1 == s.missed {
		limit++ // who goes on without what was rejected needs room for the next request, also in a window for one
	}
	if pdu.SNLess(s.window.max.Load(), limit) {
		s.window.max.Store(limit)
	}
}

// tellLocked tells an initiator that has used its command window up that it is open again, after a command that ended without an answer
// that would have said so (RFC 7143 11.19): with nothing else in flight it would wait for the next ping.
func (s *session) tellLocked() {
	limit := s.window.max.Load()
	if told := s.window.told.Load(); s.closed || limit == told || s.window.exp.Load() != told+1 {
		return
	}
	s.window.told.Store(limit)
	s.conn.sendSoon(&pdu.NOPIn{TaskTag: pdu.ReservedTag, TransferTag: pdu.ReservedTag}, snPeek)
}

// closeWindow keeps MaxCmdSN where it is: the initiator may send what it has room for, and no more.
func (s *session) closeWindow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closing = true
}

// end takes the session down and closes its connection, which ends the reader.
func (s *session) end(cause error) {
	s.conn.fail(cause)
	s.leave(cause)
}

// leave takes the session down, once: its tasks end without an answer and its nexus is lost. Disk calls in
// progress run on, and Shutdown waits for them.
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

// close ends all tasks without an answer, and keeps new ones from waiting for data.
func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, t := range s.tasks {
		s.abortLocked(t)
	}
	s.dropFreeLocked()
}

// trim gives back the room that the session keeps for its next commands and answers.
func (s *session) trim() {
	s.mu.Lock()
	s.dropFreeLocked()
	s.mu.Unlock()
	s.conn.tx.trim()
}

func (s *session) dropFreeLocked() {
	for range s.free {
		s.releaseTask()
	}
	s.free = nil
}

// releaseTask ends the use of a task that no command will have any more.
func (s *session) releaseTask() { s.conn.srv.pool.charge(-commandCost) }
