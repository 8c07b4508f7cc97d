package target

import (
	"slices"

	"kubevirt.io/disk/target/internal/scsi"
)

// abortPreempted ends the commands of nexuses that another one has fenced off, except that one's own command, and waits
// until none of their writes is at work any more (SPC-4 5.13.11.5). The fenced ones get no answer; a unit attention tells
// them why.
func (s *Server) abortPreempted(lun uint16, nexuses []*scsi.Nexus, except *scsi.Task) {
	var writes []<-chan struct{}
	for _, sess := range s.normal() {
		if slices.Contains(nexuses, sess.nexus) {
			writes = append(writes, sess.abortNumber(lun, except)...)
		}
	}
	for _, gone := range writes {
		<-gone
	}
}

// abortNumber ends the session's tasks on a LUN, in whichever way they address it, but for one. It returns a channel for
// each write that a goroutine still works on, which closes when that has ended.
func (s *session) abortNumber(lun uint16, except *scsi.Task) (writes []<-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if addressed, _ := s.fences(lun, t); addressed && &t.scsi != except {
			s.abortLocked(t)
		}
	}
	// Those that were aborted before are at work too. Nothing but writes is waited for: another one's PREEMPT AND ABORT may be
	// waiting for us.
	for t := range s.aborted {
		if addressed, mayWrite := s.fences(lun, t); addressed && mayWrite {
			if t.gone == nil {
				t.gone = make(chan struct{})
			}
			writes = append(writes, t.gone)
		}
	}
	return writes
}

// fences looks only at what newTask has set, as another goroutine may work on the task.
func (s *session) fences(lun uint16, t *task) (addressed, mayWrite bool) {
	return s.conn.srv.device.Fences(lun, t.scsi.LUN, &t.scsi.CDB)
}
