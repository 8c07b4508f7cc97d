package target

import (
	"time"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/scsi"
)

// Opening is a LUN that Admit has opened, with the admitted initiator and the end of the time
// (zero: until HandOver or Withdraw).
type Opening = serving.Opening

// Holders are the initiators of a write-exclusive LUN: its owner, the one that Admit has opened it
// to, and those that a handover has fenced.
type Holders = serving.Holders

// ErrNotLoggedIn says that HandOver has changed nothing because the admitted initiator has no
// session.
var ErrNotLoggedIn = serving.ErrNotLoggedIn

// Admit opens a write-exclusive LUN to one more initiator beside its owner: the machine that will
// take over a guest in a live migration. The LUN stays open until HandOver or Withdraw. If it has a
// Store, it stays open through a restart. The server remembers until (zero: no end), but the caller
// must end the opening then. After an error nothing has changed.
func (s *Server) Admit(lun uint16, initiator string, until time.Time) error {
	return s.disks.Admit(lun, initiator, until)
}

// HandOver makes the admitted initiator the owner. When it returns, the former owner is fenced: its
// commands in flight are aborted, none of its writes can reach the disk any more, and its
// reservations and registrations are gone. The fence stays until Admit opens the LUN to that
// initiator again. If the LUN has a Store, the fence stays through a restart. HandOver returns the
// name of the former owner, or "" if nobody is known to have used the LUN; then nobody is fenced
// for good. If the new owner is not logged in (ErrNotLoggedIn) or the Store fails, nothing changes
// and HandOver returns an error.
func (s *Server) HandOver(lun uint16) (former string, err error) { return s.disks.HandOver(lun) }

// Withdraw closes the LUN to the admitted initiator again, for example after a failed migration. It
// fences that initiator like HandOver and returns its name.
func (s *Server) Withdraw(lun uint16) (guest string, err error) { return s.disks.Withdraw(lun) }

// Openings returns the LUNs that are open, for example after a restart.
func (s *Server) Openings() []Opening { return s.disks.Openings() }

// Trouble is why commands to a LUN fail now, such as full storage.
type Trouble = scsi.Trouble

// Troubles returns why commands to a LUN fail now. Trouble is over when such commands succeed
// again.
func (s *Server) Troubles(lun uint16) []Trouble { return s.device.Troubles(lun) }

// Holders returns who has a write-exclusive LUN. It is empty for other LUNs.
func (s *Server) Holders(lun uint16) Holders { return s.disks.Holders(lun) }
