package serving

import (
	"strconv"
	"time"
)

// Operation is the kind of a request's work.
type Operation uint8

// The operations.
const (
	OpOther Operation = iota
	OpRead
	OpWrite
	OpFlush
	OpDiscard
)

// String names the operation as a metrics label.
func (o Operation) String() string {
	if names := [...]string{"other", "read", "write", "flush", "discard"}; int(o) < len(names) {
		return names[o]
	}
	return "operation " + strconv.Itoa(int(o))
}

// Observer gets the events of the front ends. Many goroutines call its methods from the request
// path, so they must not block.
type Observer interface {
	LoginAccepted(LoginEvent)
	LoginRefused(LoginEvent)
	SessionEnded(SessionEvent)
	RequestDone(RequestEvent)
	MessageRejected(reason string) // a message broke the protocol; reason: a short stable label
	PanicCaught()                  // a bug ended a session
}

// LoginEvent is a login that succeeded or was refused.
type LoginEvent struct {
	Client    string // name of the client; "": the peer did not name itself
	Remote    string // the peer's address
	Target    string // what the peer asked for, such as an iSCSI target or an NBD export
	User      string // the user that the peer authenticates as, or tried to; "": none
	Discovery bool   // the peer only asks what there is
	Reason    string // refused: a short stable label
	Err       error  // refused: the full reason, for people
}

// SessionEvent is the end of a session after LoginAccepted.
type SessionEvent struct {
	Client    string
	Remote    string
	Discovery bool
	Reason    string
}

// RequestEvent is the end of one request.
type RequestEvent struct {
	Client   string
	Number   uint16 // of the disk
	Op       Operation
	Bytes    int64         // transferred between peer and disk
	Duration time.Duration // from the request's arrival to its response being queued
	Status   uint8         // by SAM-5 5.3.1, for all protocols: see StatusGood
}

// The statuses that front ends without SCSI use.
const (
	StatusGood     = 0x00
	StatusFailed   = 0x02 // the response is an error
	StatusBusy     = 0x08 // the peer is asked to try again
	StatusConflict = 0x18 // the client may not use the disk
	StatusAborted  = 0x40 // ended without a response
)

type nopObserver struct{}

func (nopObserver) LoginAccepted(LoginEvent)  {}
func (nopObserver) LoginRefused(LoginEvent)   {}
func (nopObserver) SessionEnded(SessionEvent) {}
func (nopObserver) RequestDone(RequestEvent)  {}
func (nopObserver) MessageRejected(string)    {}
func (nopObserver) PanicCaught()              {}
