package target

import "kubevirt.io/disk/target/internal/pdu"

// learnPatience is told of each task management function. If that aborts a command that is held,
// the initiator has run out of patience, and the nexus notes that it aborts by itself.
func (s *session) learnPatience(p *pdu.TaskManagementRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if t.scsi.Waiting() && covers(p, t) {
			s.nexus.GaveUp()
		}
	}
}

// covers reports whether a function ends a command of its own session.
func covers(p *pdu.TaskManagementRequest, t *task) bool {
	switch p.Function {
	case pdu.TMAbortTask:
		return t.tag == p.RefTaskTag
	case pdu.TMAbortTaskSet, pdu.TMClearTaskSet, pdu.TMLogicalUnitReset:
		return t.scsi.For(p.LUN)
	}
	return p.Function == pdu.TMTargetWarmReset || p.Function == pdu.TMTargetColdReset
}
