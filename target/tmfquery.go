package target

import "kubevirt.io/disk/target/internal/pdu"

// manageExtended executes the functions of RFC 7144 6.3 in a session that has negotiated them. They
// end no command and change nothing of other sessions, except that I_T NEXUS RESET ends the session
// that sends it.
func (c *conn) manageExtended(p *pdu.TaskManagementRequest) (response pdu.TMResponse,
	additional [3]byte) {
	sess, dev := c.session(), c.srv.device
	if !sess.extended() || p.Function > pdu.TMQueryAsyncEvent {
		return pdu.TMNotSupported, additional
	}
	if p.Function == pdu.TMITNexusReset { // the only function without a LUN
		sess.abortAll()
		return pdu.TMComplete, additional
	}
	if !dev.LUNExists(p.LUN) {
		return pdu.TMLUNNotExist, additional
	}
	found := false
	switch p.Function {
	case pdu.TMQueryTask:
		return sess.queryTask(p), additional
	case pdu.TMQueryTaskSet:
		found = sess.hasTasks(p.LUN)
	case pdu.TMQueryAsyncEvent:
		additional, found = dev.PendingAttention(p.LUN, sess.nexus)
	}
	if found {
		return pdu.TMSucceeded, additional
	}
	return pdu.TMComplete, additional
}

// queryTask reports whether a command of the session is in the task set. A command that has arrived
// ahead of its turn counts, because it will be executed. A command that may still be under way is
// skipped: it must not be executed after the initiator has learned that it is not there.
func (s *session) queryTask(p *pdu.TaskManagementRequest) pdu.TMResponse {
	if p.RefTaskTag == p.TaskTag || s.isManagement(p.RefTaskTag) {
		// task management requests cannot be queried, and other requests have ended
		return pdu.TMRejected
	}
	s.mu.Lock()
	t := s.tasks[p.RefTaskTag]
	found := t != nil && s.conn.srv.device.SameUnit(t.scsi.LUN, p.LUN)
	s.mu.Unlock()
	if found {
		return pdu.TMSucceeded
	}
	if _, ok := s.heldCommand(p); ok {
		return pdu.TMSucceeded
	}
	// Outside the command window there is no task, either. For that the function has a response of
	// its own (RFC 7144 6.4.2).
	s.skip(p)
	return pdu.TMComplete
}

// hasTasks reports whether the session has a command for a LUN, executing or waiting for its turn.
func (s *session) hasTasks(lun uint64) bool {
	for _, h := range s.held {
		if h.hdr.Opcode() == pdu.OpSCSICommand && s.conn.srv.device.SameUnit(h.hdr.LUN(), lun) {
			return true
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if t.scsi.For(lun) {
			return true
		}
	}
	return false
}
