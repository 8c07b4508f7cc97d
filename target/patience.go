package target

import (
	"time"

	"kubevirt.io/disk/target/internal/pdu"
)

// patience returns how long a command of the session may wait for content while none comes. A long
// time is best for an initiator without a time limit, such as QEMU. An initiator with a limit, such
// as Linux, aborts a command that exceeds it and sends it again. If that happens to the command
// again, Linux resets the LUN and delays all commands of the session. So from the first abort on it
// gets its answers earlier.
func (s *session) patience() time.Duration {
	lim := &s.conn.srv.opt.Limits
	if s.impatient.Load() {
		return min(lim.DistantTimeout, lim.ImpatientTimeout)
	}
	return lim.DistantTimeout
}

// learnPatience notes whether the initiator ends a held command of its own.
func (s *session) learnPatience(p *pdu.TaskManagementRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if t.scsi.Waiting() && covers(p, t) {
			s.impatient.Store(true)
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
