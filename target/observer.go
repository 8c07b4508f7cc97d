package target

import (
	"time"

	"kubevirt.io/disk/target/internal/scsi"
)

// Operation is the kind of a command's work, for metrics.
type Operation = scsi.Operation

// The operations.
const (
	OpRead    = scsi.OpRead
	OpWrite   = scsi.OpWrite
	OpFlush   = scsi.OpFlush
	OpDiscard = scsi.OpDiscard
	OpOther   = scsi.OpOther
)

// Observer is told about events. Many goroutines call its methods at once from the request path, so
// they must not block.
type Observer interface {
	LoginAccepted(LoginEvent)
	LoginRefused(LoginEvent)
	SessionEnded(SessionEvent)
	CommandDone(CommandEvent)
	PDURejected(reason string) // a Reject PDU was sent (RFC 7143 11.17); reason is its name
	PanicCaught()              // a bug ended a session
}

// LoginEvent is a login that succeeded or was refused.
type LoginEvent struct {
	Initiator string // "" if the peer did not name itself
	Remote    string // the peer's address
	Target    string // the requested target, "" in a discovery session
	User      string // the CHAP name, "" without CHAP; refused: that was tried
	Discovery bool
	Reason    string // refused: a short stable label
	Err       error  // refused: the full reason, for people
}

// SessionEvent is the end of a session that was in full feature phase.
type SessionEvent struct {
	Initiator string
	Remote    string
	Discovery bool
	Reason    string
}

// CommandEvent is the end of one SCSI command.
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
