package target

import (
	"slices"

	"kubevirt.io/disk/target/internal/scsi"
)

// abortFenced ends the commands of nexuses that another nexus has fenced, but not the command of
// that one (SPC-4 5.13.11.5). The commands get no answer; a unit attention tells their initiators
// why. Commands whose data is still coming, or which wait for a disk, end later and change nothing
// any more. The SCSI layer waits for those that can still change the disk.
func (s *Server) abortFenced(nexuses []*scsi.Nexus, meant func(*scsi.Task) bool) {
	for _, sess := range s.normalSessions() {
		if slices.Contains(nexuses, sess.nexus) {
			sess.abortTasks(func(t *task) bool { return meant(&t.scsi) })
		}
	}
}
