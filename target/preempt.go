package target

import (
	"slices"

	"kubevirt.io/disk/target/internal/scsi"
)

// abortFenced ends the commands of nexuses that another one has fenced off, except that one's own command (SPC-4 5.13.11.5).
// The fenced ones get no answer; a unit attention tells them why. Commands whose data a peer is still sending, or which wait for
// a disk, come to their end later and change nothing by then: the SCSI layer waits for those that may.
func (s *Server) abortFenced(lun uint16, nexuses []*scsi.Nexus, except *scsi.Task) {
	for _, sess := range s.normal() {
		if slices.Contains(nexuses, sess.nexus) {
			sess.abortNumber(lun, except)
		}
	}
}

// abortNumber ends the session's tasks on a LUN, in whichever way they address it, but for one.
func (s *session) abortNumber(lun uint16, except *scsi.Task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if s.conn.srv.device.Addresses(lun, t.scsi.LUN) && &t.scsi != except {
			s.abortLocked(t)
		}
	}
}
