package target

import (
	"time"

	"kubevirt.io/disk/target/internal/scsi"
)

// Opening is a LUN that Admit has opened: to whom, and until when (zero: until HandOver or
// Withdraw).
type Opening = scsi.Opening

// Holders are who has a write-exclusive LUN: its owner, the initiator that Admit has opened it to,
// and who is fenced since a handover.
type Holders = scsi.Holders

// ErrNotLoggedIn is why HandOver leaves a LUN with its owner where the admitted initiator has no
// session.
var ErrNotLoggedIn = scsi.ErrNotLoggedIn

// Admit opens a write-exclusive LUN to one more initiator, by name, beside the one that owns it:
// for the machine that is to take a guest over in a live migration. It stays open until HandOver or
// Withdraw, also through a restart where the LUN has a Store. The server keeps until, and leaves it
// to the caller to end the time then: zero, no time. An error says why it cannot be, and nothing
// has changed.
func (s *Server) Admit(lun uint16, initiator string, until time.Time) error {
	return s.device.Admit(lun, initiator, until)
}

// HandOver makes the admitted initiator the owner. When it returns, the former one is fenced: its
// commands in flight are aborted, none of its writes can reach the disk any more, and its
// reservations and registrations are gone. It stays fenced until the LUN is opened to it again,
// also after a restart where the LUN has a Store. Its name is returned, or "" where nobody is known
// to have had the LUN, and nobody is fenced for good. Unless the new owner is logged in
// (ErrNotLoggedIn), and the Store keeps that, nothing changes, and the error says so.
func (s *Server) HandOver(lun uint16) (former string, err error) { return s.device.HandOver(lun) }

// Withdraw closes the LUN to the admitted initiator again, as after a migration that failed. It is
// fenced as by HandOver, and its name is returned.
func (s *Server) Withdraw(lun uint16) (guest string, err error) { return s.device.Withdraw(lun) }

// Openings are the LUNs that are open, as after a restart.
func (s *Server) Openings() []Opening { return s.device.Openings() }

// Holders tells who has a write-exclusive LUN; of other LUNs it is nobody.
func (s *Server) Holders(lun uint16) Holders { return s.device.Holders(lun) }
