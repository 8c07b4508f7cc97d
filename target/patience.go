package target

import (
	"time"

	"kubevirt.io/disk/target/internal/pdu"
)

// patience is for how long a command of the session is held that waits for content, while nothing
// comes. An initiator without a time limit of its own, as QEMU, is best served by a long time. One
// that has a limit, as Linux, aborts a command that exceeds it and sends it again. If that happens
// to the command again, Linux resets the LUN and holds up all commands of the session. So it is
// given its answers earlier from then on.
func (s *session) patience() time.Duration {
	lim := &s.conn.srv.opt.Limits
	if s.impatient.Load() {
		return min(lim.DistantTimeout, lim.ImpatientTimeout)
	}
	return lim.DistantTimeout
}

// learnPatience looks whether the initiator ends a command of its own that is held.
func (s *session) learnPatience(p *pdu.TaskManagementRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if t.scsi.Waiting() && covers(p, t) {
			s.impatient.Store(true)
		}
	}
}

// covers reports whether a function ends a command of the session that it comes from.
func covers(p *pdu.TaskManagementRequest, t *task) bool {
	switch p.Function {
	case pdu.TMAbortTask:
		return t.tag == p.RefTaskTag
	case pdu.TMAbortTaskSet, pdu.TMClearTaskSet, pdu.TMLogicalUnitReset:
		return t.scsi.For(p.LUN)
	}
	return p.Function == pdu.TMTargetWarmReset || p.Function == pdu.TMTargetColdReset
}
