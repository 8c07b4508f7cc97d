package target

// Admit opens a write-exclusive LUN to one more initiator, by name, beside the one that owns it: for the machine that is to
// take a guest over in a live migration. It stays open until HandOver or Withdraw. An error says why it cannot be.
func (s *Server) Admit(lun uint16, initiator string) error { return s.device.Admit(lun, initiator) }

// HandOver makes the admitted initiator the owner. When it returns, the former one is fenced: its commands in flight are
// aborted, none of its writes can reach the disk any more, and its reservations and registrations are gone. Unless the new owner
// is logged in, nothing changes, and the error says so.
func (s *Server) HandOver(lun uint16) error { return s.device.HandOver(lun) }

// Withdraw closes the LUN to the admitted initiator again, as after a migration that failed. It is fenced as by HandOver.
func (s *Server) Withdraw(lun uint16) error { return s.device.Withdraw(lun) }

// Holders tells who has a write-exclusive LUN: its owner, and the initiator that it was opened to by Admit. "": nobody.
func (s *Server) Holders(lun uint16) (owner, admitted string) { return s.device.Holders(lun) }
