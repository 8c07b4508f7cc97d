package target

import (
	"slices"

	"kubevirt.io/disk/target/internal/scsi"
)

// abortFenced ends the commands of nexuses that another one has fenced off, except that one's own
// command (SPC-4 5.13.11.5). The fenced ones get no answer; a unit attention tells them why.
// Commands whose data a peer is still sending, or which wait for a disk, come to their end later
// and change nothing by then: the SCSI layer waits for those that may.
func (s *Server) abortFenced(nexuses []*scsi.Nexus, meant func(*scsi.Task) bool) {
	for _, sess := range s.normal() {
		if slices.Contains(nexuses, sess.nexus) {
			sess.abortTasks(func(t *task) bool { return meant(&t.scsi) })
		}
	}
}
