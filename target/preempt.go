package target

import (
	"slices"

	"kubevirt.io/disk/target/internal/scsi"
)

// abortPreempted ends the commands of nexuses that another one has fenced off, except that one's own command, and waits
// until none of their writes is at work any more (SPC-4 5.13.11.5). The fenced ones get no answer; a unit attention tells
// them why.
func (s *Server) abortPreempted(lun uint16, nexuses []*scsi.Nexus, except *scsi.Task) {
	type write struct {
		sess *session
		gone <-chan struct{}
	}
	var writes []write
	for _, sess := range s.normal() {
		if slices.Contains(nexuses, sess.nexus) {
			for _, gone := range sess.abortNumber(lun, except) {
				writes = append(writes, write{sess, gone})
			}
		}
	}
	for _, w := range writes {
		select {
		case <-w.gone:
		case <-w.sess.conn.panicked: // its goroutine, and with it the write, may have come to nothing
		}
	}
}

// abortNumber ends the session's tasks on a LUN, in whichever way they address it, but for one. It returns a channel for
// each write that a goroutine still works on, which closes when that has ended.
func (s *session) abortNumber(lun uint16, except *scsi.Task) (writes []<-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		// Of a task that another goroutine works on, only what newTask has set may be looked at.
		addressed, mayWrite := s.conn.srv.device.Fences(lun, t.scsi.LUN, &t.scsi.CDB)
		if !addressed || &t.scsi == except {
			continue
		}
		s.abortLocked(t)
		// Nothing else is waited for: another one's PREEMPT AND ABORT may be waiting for us.
		if t.state == taskAborted && mayWrite {
			if t.gone == nil {
				t.gone = make(chan struct{})
			}
			writes = append(writes, t.gone)
		}
	}
	return writes
}
