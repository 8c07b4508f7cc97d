package target

import (
	"slices"

	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// handleTaskManagement executes a task management function at once (RFC 7143 11.5, RFC 7144 6.3,
// SAM-5 7). Tasks that wait for data end at once. A task whose disk call is in progress ends
// without an answer when that call returns. Until then the SCSI layer makes later writes to its
// blocks wait, so that the call cannot overwrite them.
func (c *conn) handleTaskManagement(h *pdu.Header, seg *segment) error {
	var p pdu.TaskManagementRequest
	if err := p.Decode(h); err != nil {
		return c.malformed(err)
	}
	if ok, err := c.admit(h, seg); !ok {
		return err
	}
	if err := seg.discard(); err != nil {
		return c.badData(h, err)
	}
	sess := c.session()
	if sess.early(&p) {
		if len(sess.waiting) >= maxImmediate {
			return c.refuse(pdu.RejectImmediate, seg)
		}
		sess.waiting = append(sess.waiting, &p)
		return nil
	}
	c.received(h)
	return c.execute(&p)
}

// early reports whether a function that covers many tasks must wait because commands with lower
// numbers, which it covers, have not arrived yet (RFC 7143 4.2.3.3, 11.5.1).
func (s *session) early(p *pdu.TaskManagementRequest) bool {
	switch p.Function {
	case pdu.TMAbortTaskSet, pdu.TMClearTaskSet, pdu.TMLogicalUnitReset:
		exp, limit := s.window.numbers()
		return p.Immediate && pdu.SNLess(exp, p.CmdSN) && !pdu.SNLess(limit+1, p.CmdSN)
	}
	return false
}

func (c *conn) execute(p *pdu.TaskManagementRequest) error {
	resp := pdu.TaskManagementResponse{TaskTag: p.TaskTag}
	if p.Function >= pdu.TMQueryTask {
		resp.Response, resp.Additional = c.manageExtended(p)
	} else {
		resp.Response = c.manage(p)
	}
	var parting error
	if resp.Response == pdu.TMComplete {
		switch p.Function {
		case pdu.TMTargetColdReset:
			parting = errTargetReset
		case pdu.TMITNexusReset:
			parting = errNexusReset
		}
	}
	if parting != nil {
		c.detach()
	}
	c.tx.send(&resp, snAdvance, nil, nil)
	return parting
}

// manage executes the functions of RFC 7143.
func (c *conn) manage(p *pdu.TaskManagementRequest) pdu.TMResponse {
	sess, dev := c.session(), c.srv.device
	switch p.Function {
	case pdu.TMAbortTask, pdu.TMAbortTaskSet, pdu.TMClearTaskSet, pdu.TMLogicalUnitReset:
		if !dev.LUNExists(p.LUN) && !(p.Function == pdu.TMAbortTask && sess.hasTask(p)) {
			return pdu.TMLUNNotExist
		}
	}
	if !c.authorized(p) {
		return pdu.TMAuthorizationFailed
	}
	sess.noteAborts(p)
	switch p.Function {
	case pdu.TMAbortTask:
		return sess.abortTask(p)
	case pdu.TMAbortTaskSet:
		sess.abortLUN(p.LUN)
	case pdu.TMClearTaskSet:
		var affected []*scsi.Nexus
		for _, other := range c.srv.normalSessions() {
			if n := other.abortLUN(p.LUN); n > 0 && other != sess {
				affected = append(affected, other.nexus)
			}
		}
		dev.TasksCleared(p.LUN, sess.nexus, affected)
	case pdu.TMLogicalUnitReset:
		for _, other := range c.srv.normalSessions() {
			other.abortLUN(p.LUN)
		}
		dev.ResetLUN(p.LUN)
	case pdu.TMTargetWarmReset, pdu.TMTargetColdReset:
		sess.skipAll(p)
		for _, other := range c.srv.normalSessions() {
			other.abortAll()
		}
		dev.ResetTarget()
		if p.Function == pdu.TMTargetColdReset {
			// All connections close (RFC 7143 11.5.1), our own after the response.
			for _, other := range c.srv.normalSessions() {
				if other != sess {
					other.end(errTargetReset)
				}
			}
		}
	case pdu.TMTaskReassign:
		return pdu.TMReassignNotSupported
	default:
		return pdu.TMNotSupported
	}
	return pdu.TMComplete
}

// authorized reports whether the initiator may execute a function that also ends tasks of others
// (RFC 7143 11.5.1, 11.6.1).
func (c *conn) authorized(p *pdu.TaskManagementRequest) bool {
	switch p.Function {
	case pdu.TMClearTaskSet, pdu.TMLogicalUnitReset:
		return c.srv.device.MayReset(p.LUN, c.session().nexus)
	case pdu.TMTargetWarmReset, pdu.TMTargetColdReset:
		return c.srv.device.MayResetTarget(c.session().nexus)
	}
	return true
}

// abortTask ends one task of the session (RFC 7143 11.5.5). If no task has that tag, the number of
// the command tells whether it has ended already, or has not arrived and must not be executed
// later.
func (s *session) abortTask(p *pdu.TaskManagementRequest) pdu.TMResponse {
	s.mu.Lock()
	if t := s.tasks[p.RefTaskTag]; t != nil && s.conn.srv.device.SameUnit(t.scsi.LUN, p.LUN) {
		s.abortLocked(t)
		s.mu.Unlock()
		return pdu.TMComplete
	}
	s.mu.Unlock()
	if s.isManagement(p.RefTaskTag) {
		return pdu.TMRejected
	}
	if sn, ok := s.heldCommand(p); ok {
		s.fill(sn)
		return pdu.TMComplete
	}
	if s.skip(p) {
		return pdu.TMComplete
	}
	return pdu.TMTaskNotExist
}

// hasTask reports whether the session has the task that a request refers to. Its LUN may have been
// removed.
func (s *session) hasTask(p *pdu.TaskManagementRequest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tasks[p.RefTaskTag]
	return t != nil && t.scsi.LUN == p.LUN
}

// isManagement reports whether a task management request with this tag waits to be executed.
func (s *session) isManagement(tag uint32) bool {
	for _, h := range s.held {
		if h.hdr.TaskTag() == tag && h.hdr.Opcode() == pdu.OpTaskManagementRequest {
			return true
		}
	}
	return slices.ContainsFunc(s.waiting,
		func(p *pdu.TaskManagementRequest) bool { return p.TaskTag == tag })
}

// heldCommand finds the command that a request refers to among those that wait for their turn.
func (s *session) heldCommand(p *pdu.TaskManagementRequest) (cmdSN uint32, ok bool) {
	for sn, h := range s.held {
		if h.hdr.TaskTag() == p.RefTaskTag && h.hdr.Opcode() == pdu.OpSCSICommand &&
			s.conn.srv.device.SameUnit(h.hdr.LUN(), p.LUN) {
			return sn, true
		}
	}
	return 0, false
}

// skip counts the command that a request refers to as received, so that the command is not executed
// if it arrives later. It does nothing if that command cannot be under way (RFC 7143 11.6.1).
func (s *session) skip(p *pdu.TaskManagementRequest) bool {
	exp, limit := s.window.numbers()
	if pdu.SNLess(p.RefCmdSN, exp) {
		_, ok := s.refused[p.RefCmdSN]
		delete(s.refused, p.RefCmdSN)
		return ok
	}
	if pdu.SNLess(limit, p.RefCmdSN) || !pdu.SNLess(p.RefCmdSN, p.CmdSN) ||
		s.held[p.RefCmdSN] != nil {
		return false
	}
	s.fill(p.RefCmdSN)
	return true
}

// skipAll counts all commands that a target reset covers as received. None of them will be
// executed, and the reset does not wait for them (RFC 7143 4.2.3.3).
func (s *session) skipAll(p *pdu.TaskManagementRequest) {
	exp, limit := s.window.numbers()
	if pdu.SNLess(limit+1, p.CmdSN) {
		return
	}
	for sn := exp; pdu.SNLess(sn, p.CmdSN); sn++ {
		if h := s.held[sn]; h == nil || h.hdr.Opcode() == pdu.OpSCSICommand {
			s.fill(sn)
		}
	}
}

// fill uses up a CmdSN in its turn, instead of a command that is held or has not arrived.
func (s *session) fill(cmdSN uint32) {
	if h := s.held[cmdSN]; h != nil {
		h.release()
	}
	if s.held == nil {
		s.held = make(map[uint32]*heldPDU)
	}
	s.held[cmdSN] = &heldPDU{hdr: nopHeader(cmdSN)}
}

// nopHeader is a PDU that does nothing but use up its CmdSN.
func nopHeader(cmdSN uint32) (h pdu.Header) {
	(&pdu.NOPOut{TaskTag: pdu.ReservedTag, TransferTag: pdu.ReservedTag, CmdSN: cmdSN}).Encode(&h)
	return h
}

// abortLUN ends the session's tasks on one LUN, however they address it, and returns how many there
// were.
func (s *session) abortLUN(lun uint64) int {
	return s.abortTasks(func(t *task) bool { return t.scsi.For(lun) })
}

func (s *session) abortAll() { s.abortTasks(func(*task) bool { return true }) }

// abortTasks ends the session's tasks for which meant returns true, and returns how many there
// were.
func (s *session) abortTasks(meant func(*task) bool) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		if meant(t) {
			s.abortLocked(t)
			n++
		}
	}
	return n
}

func (s *Server) normalSessions() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*session, 0, len(s.sessions))
	for _, sess := range s.sessions {
		list = append(list, sess)
	}
	return list
}

// noteAborts is called for each task management function. If the function aborts a command that is
// held, the initiator has a timeout of its own, and the nexus notes that: see
// serving.Client.HoldTimeout.
func (s *session) noteAborts(p *pdu.TaskManagementRequest) {
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

// abortFenced ends the commands of nexuses that another nexus has fenced (SPC-4 5.13.11.5), but not
// that nexus's own command. The commands get no answer; a unit attention tells their initiators
// why. Commands whose data is still coming, or which wait for a disk, end later and change nothing
// any more. The SCSI layer waits for commands that can still change the disk.
func (s *Server) abortFenced(nexuses []*scsi.Nexus, meant func(*scsi.Task) bool) {
	for _, sess := range s.normalSessions() {
		if slices.Contains(nexuses, sess.nexus) {
			sess.abortTasks(func(t *task) bool { return meant(&t.scsi) })
		}
	}
}
