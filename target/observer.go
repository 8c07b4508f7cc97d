package target

import (
	"time"

	"kubevirt.io/disk/target/internal/scsi"
)

// Operation is the kind of work that a command did, as metrics count it.
type Operation = scsi.Operation

// The operations.
const (
	OpRead    = scsi.OpRead
	OpWrite   = scsi.OpWrite
	OpFlush   = scsi.OpFlush
	OpDiscard = scsi.OpDiscard
	OpOther   = scsi.OpOther
)

// Observer is told what happens. Its methods are called from the request path by many goroutines at
// once, and must not block.
type Observer interface {
	LoginAccepted(LoginEvent)
	LoginRefused(LoginEvent)
	SessionEnded(SessionEvent)
	CommandDone(CommandEvent)
	PDURejected(reason string) // a Reject PDU was sent (RFC 7143 11.17), by the name of its reason
	PanicCaught()              // a bug ended one session and nothing else
}

// LoginEvent is a login that reached full feature phase, or did not.
type LoginEvent struct {
	Initiator string // "" if the peer did not come so far as to name itself
	Remote    string // the peer's address
	Target    string // the target name asked for, "" in a discovery session
	User      string // the CHAP name, "" without CHAP
	Discovery bool
	Reason    string // refused: a short stable label
	Err       error  // refused: the whole reason, for people
}

// SessionEvent is the end of a session that was in full feature phase.
type SessionEvent struct {
	Initiator string
	Remote    string
	Discovery bool
	Reason    string
}

// CommandEvent is one SCSI command that has ended.
type CommandEvent struct {
	Initiator string
	LUN       uint16
	Op        Operation
	Bytes     int64         // transferred between initiator and disk
	Duration  time.Duration // from the command's arrival to its response being queued
	Status    uint8         // SAM-5 status code; TASK ABORTED (40h) if it ended without an answer
}

type nopObserver struct{}

func (nopObserver) LoginAccepted(LoginEvent)  {}
func (nopObserver) LoginRefused(LoginEvent)   {}
func (nopObserver) SessionEnded(SessionEvent) {}
func (nopObserver) CommandDone(CommandEvent)  {}
func (nopObserver) PDURejected(string)        {}
func (nopObserver) PanicCaught()              {}
