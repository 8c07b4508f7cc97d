package target

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// This file turns PDUs into SCSI commands and the outcomes of commands into PDUs.

// maxImmediate is how many immediate commands a session may have in flight, outside the command
// window. RFC 7143 4.2.2.1.1 requires room for at least one task management request, which does not
// count here, and one other.
const maxImmediate = 8

// maxSense is the size in bytes of the longest sense data with its length field.
const maxSense = 256 + 2

// busyQualifier is the status qualifier of BUSY (SAM-5 5.3.2): the initiator shall try this logical
// unit again after a tenth of a second, when memory is likely to be free.
const busyQualifier = 1

// The conditions that the transport itself detects (SPC-4 table D.1, RFC 7143 11.4.7.2).
var (
	errUnexpectedUnsolicited = scsi.CheckCondition(scsi.AbortedCommand, 0x0c, 0x0c)
	errWrongAmount           = scsi.CheckCondition(scsi.AbortedCommand, 0x0c, 0x0d)
	errServiceCRC            = scsi.CheckCondition(scsi.AbortedCommand, 0x47, 0x05)
	errDataPhase             = scsi.CheckCondition(scsi.AbortedCommand, 0x4b, 0x00)
)

// task is one SCSI command of a session, from its arrival to its response.
type task struct {
	sess      *session
	scsi      scsi.Task
	tag       uint32 // initiator task tag
	cmdSN     uint32
	expectIn  int64 // bytes the initiator expects to receive
	expectOut int64 // bytes it expects to send
	immediate bool
	started   time.Duration // since the server's start
	begun     time.Duration // the same, when the last data of the last burst arrived

	state taskState // guarded by session.mu
	// guarded by session.mu; the goroutine that works on the task; nil: the task waits for data
	owner *runner

	out  dataOut // data from the initiator; only the reader uses it while collecting
	sent int64   // Data-In bytes queued
	snIn uint32  // DataSN of the next Data-In
}

// taskState is the state of a task: it decides who may end it.
type taskState uint8

const (
	taskCollecting taskState = iota // waits for Data-Out; the holder of session.mu may end it
	taskExecuting                   // a goroutine works on the task, and ends it
	taskAborted                     // a goroutine works on the task, which ends without an answer
)

// newTask takes a place for a command in the command window, or returns why there is none.
func (s *session) newTask(run *runner, cmd *pdu.SCSICommand) (*task, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed { // the PDU was received before the connection was closed
		return nil, errSessionEnded
	}
	if s.tasks[cmd.TaskTag] != nil {
		return nil, errTagInUse
	}
	if cmd.Immediate {
		if s.immediate >= maxImmediate {
			return nil, errTooManyTasks
		}
		s.immediate++
	} else {
		s.counted++
	}
	var t *task
	if n := len(s.free); n > 0 {
		t = s.free[n-1]
		s.free = s.free[:n-1]
	} else {
		t = new(task)
		s.conn.srv.pool.Charge(memory.RequestCost)
	}
	t.sess, t.tag, t.cmdSN, t.immediate = s, cmd.TaskTag, cmd.CmdSN, cmd.Immediate
	t.expectIn, t.expectOut = 0, 0
	if cmd.Read {
		t.expectIn = int64(cmd.ExpectedLength)
	}
	if cmd.Write {
		t.expectOut = int64(cmd.ExpectedLength)
	}
	t.state, t.owner, run.task = taskExecuting, run, t
	t.started = time.Since(s.conn.srv.start)
	t.begun = t.started
	t.sent, t.snIn = 0, 0
	t.scsi.Nexus, t.scsi.LUN, t.scsi.CDB = s.nexus, cmd.LUN, cmd.CDB
	t.scsi.Offered = t.expectOut
	t.scsi.Executor = run
	s.conn.srv.device.Address(&t.scsi)
	s.tasks[cmd.TaskTag] = t
	return t, nil
}

var (
	errTagInUse     = errors.New("the initiator task tag is in use")
	errSessionEnded = errors.New("the session has ended")
)

// forgetLocked frees a task's tag and its place in the window. After this nothing may use t.
func (s *session) forgetLocked(t *task) {
	t.owner = nil
	answered := t.state == taskExecuting
	if t.state != taskAborted { // otherwise the tag is free, or another task has it
		delete(s.tasks, t.tag)
	}
	if t.immediate {
		s.immediate--
	} else {
		s.counted--
	}
	t.out.release()
	t.scsi.Reset()
	s.reopenLocked()
	if !answered {
		s.tellLocked()
	}
	if s.closed {
		s.releaseTask()
		return
	}
	s.free = append(s.free, t)
}

// dropLocked ends a task without an answer and forgets it.
func (s *session) dropLocked(t *task) {
	s.conn.observe(t, uint8(scsi.StatusTaskAborted))
	s.forgetLocked(t)
}

// abortLocked ends a task without an answer: at once if it waits for data, otherwise when its
// goroutine is done. The tag is free at once, the place in the window when the task has ended.
func (s *session) abortLocked(t *task) {
	if t.state == taskCollecting {
		s.dropLocked(t)
		return
	}
	t.state = taskAborted
	t.scsi.Abort()
	delete(s.tasks, t.tag)
}

// handleSCSICommand starts a command (RFC 7143 11.3).
func (c *conn) handleSCSICommand(run *runner, h *pdu.Header, seg *segment) error {
	sess := c.session()
	var cmd pdu.SCSICommand
	if err := cmd.Decode(h); err != nil {
		return c.malformed(err)
	}
	if ok, err := c.admit(h, seg); !ok {
		return err
	}
	t, err := sess.newTask(run, &cmd)
	switch {
	case errors.Is(err, errTagInUse):
		return c.refuse(pdu.RejectTaskInProgress, seg)
	case errors.Is(err, errSessionEnded):
		return err
	case err != nil:
		return c.refuse(pdu.RejectImmediate, seg)
	}
	sess.received(cmd.CmdSN, cmd.Immediate)
	if err := c.srv.device.Prepare(&t.scsi); err != nil {
		return c.refuseCommand(t, &cmd, seg, err)
	}
	if t.scsi.Dir == scsi.DirOut {
		return c.startWrite(run, t, &cmd, seg)
	}
	if seg.left > 0 || seg.held != nil {
		// The initiator may send data for a command that takes none. Ignore it.
		if err := seg.discard(); errors.Is(err, errDataDigest) {
			c.rejectHeader(pdu.RejectDataDigest, h)
			c.complete(t, errServiceCRC)
			return nil
		} else if err != nil {
			c.abandon(t)
			return err
		}
	}
	if t.scsi.Dir == scsi.DirIn {
		return c.runRead(run, t)
	}
	return c.finishTask(run, t)
}

// ignore drops a PDU that is outside the command window.
func (c *conn) ignore(seg *segment) error {
	if err := seg.discard(); !errors.Is(err, errDataDigest) {
		return err
	}
	return nil
}

// refuseCommand ends a command that is not executed. If unsolicited data follows, it first waits
// for the end of that data (RFC 7143 11.4.2), so that no data is under way when the tag is free
// again.
func (c *conn) refuseCommand(t *task, cmd *pdu.SCSICommand, seg *segment, cause error) error {
	t.out.tag, t.out.failed = pdu.ReservedTag, cause
	follows := !cmd.Final && cmd.Write && cmd.ExpectedLength > 0 && !t.sess.params.InitialR2T
	return c.dropBurst(t, seg, !follows)
}

// dropData ends a command whose data is ignored, at the last PDU of the data. It drains that PDU
// first, so that framing survives.
//
// By RFC 7143 7.8, a command whose immediate data has a wrong digest is discarded after the Reject,
// and the initiator sends it again with the same number. But that needs error recovery level 1:
// Linux would only abort the command after its timeout, with all commands behind it delayed. So we
// answer the command, and Linux tries again at once.
func (c *conn) dropData(t *task, seg *segment, cause error) error {
	h := c.rx.hdr
	if err := seg.discard(); errors.Is(err, errDataDigest) {
		c.rejectHeader(pdu.RejectDataDigest, &h)
		cause = errServiceCRC
	} else if err != nil {
		c.abandon(t)
		return err
	}
	c.complete(t, cause)
	return nil
}

// flushUnlessReader flushes the queue for a goroutine that has lost the reading role. The reader
// flushes before it waits for the network. For the reader, flushUnlessReader flushes only if much
// is queued, which takes memory and keeps the initiator waiting.
func (c *conn) flushUnlessReader(run *runner) error {
	if run.Reading && run.queued < c.flushAt() {
		return nil
	}
	run.queued = 0
	return c.tx.Flush()
}

// complete ends a command with the error cause, or with GOOD if cause is nil.
func (c *conn) complete(t *task, cause error) { c.respond(t, scsi.StatusGood, cause) }

// respond ends a command. Its tag is free before the response is on the wire. Nothing is sent if
// the task was aborted meanwhile.
func (c *conn) respond(t *task, status scsi.Status, cause error) {
	var sense *memory.Buffer
	var resp pdu.SCSIResponse
	if cause != nil {
		if errors.Is(cause, errBusy) {
			status = scsi.StatusBusy
		} else {
			sense = c.srv.pool.Must(maxSense)
			var data []byte
			status, data = c.srv.device.Outcome(&t.scsi, cause, sense.B[2:2])
			// Outcome appends to the given buffer, or adds nothing (RFC 7143 11.4.7.1).
			binary.BigEndian.PutUint16(sense.B, uint16(len(data)))
			sense.B = sense.B[:2+copy(sense.B[2:], data)]
			if len(data) == 0 {
				sense.Release()
				sense = nil
			}
		}
	}
	if status == scsi.StatusBusy && t.sess.extended() {
		resp.StatusQualifier = busyQualifier
	}
	resp.Status = uint8(status)
	resp.TaskTag = t.tag
	resp.Overflow, resp.Underflow, resp.Residual = t.residual(cause != nil)
	// Data-In only: 0 for a write, also after R2Ts (RFC 7143 11.4.8)
	resp.ExpDataSN = t.snIn
	var data []byte
	if sense != nil {
		data = sense.B
		resp.DataLen = len(data)
	}
	s := t.sess
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.state == taskAborted {
		s.dropLocked(t)
		sense.Release()
		return
	}
	run, acks := t.owner, t.out.total
	c.observe(t, uint8(status))
	s.forgetLocked(t)
	queued := c.tx.respond(&resp, acks, data, sense)
	if run != nil {
		run.queued = queued
	}
}

// residual returns by how many bytes the moved data differs from the expected length (RFC 7143
// 11.4.5.1). For a failed command, the data moved so far counts.
func (t *task) residual(failed bool) (overflow, underflow bool, n uint32) {
	in, out := t.moves(failed)
	switch {
	case failed, t.scsi.Dir == scsi.DirNone:
		return differ(in+out, max(t.expectIn, t.expectOut))
	case t.scsi.Dir == scsi.DirIn: // the initiator expected data in the other direction
		return differ(in, t.expectIn)
	}
	return differ(out, t.expectOut)
}

// moves returns how many bytes the command moves to the initiator, and how many from it.
func (t *task) moves(failed bool) (in, out int64) {
	switch {
	case failed:
		return t.sent, t.out.total
	case t.scsi.Dir == scsi.DirIn:
		return t.scsi.Length, 0
	case t.scsi.Dir == scsi.DirOut:
		return 0, t.scsi.Length
	}
	return 0, 0
}

func differ(moves, expected int64) (overflow, underflow bool, n uint32) {
	switch {
	case moves > expected:
		return true, false, uint32(min(moves-expected, math.MaxUint32))
	case moves < expected:
		return false, true, uint32(expected - moves)
	}
	return false, false, 0
}

func (c *conn) observe(t *task, status uint8) {
	number, ok := t.scsi.LUNNumber()
	if !ok {
		return // no metrics for a LUN that does not exist
	}
	moved := t.sent
	if t.scsi.Dir == scsi.DirOut {
		moved = t.out.total
	}
	now := time.Since(c.srv.start)
	op := t.scsi.Op()
	// the command may have waited for data, not for the disk
	aborted := status == uint8(scsi.StatusTaskAborted)
	once := op == serving.OpRead && moved <= chunkSize || op == serving.OpWrite
	if once && !aborted && t.owner != nil && !t.owner.late {
		t.owner.Took(&t.scsi.Request, t.scsi.Disk(), now-t.begun)
	}
	t.sess.work.count(op, moved)
	if status == uint8(scsi.StatusGood) {
		t.scsi.Worked()
	}
	c.srv.opt.Disks.Observer.RequestDone(serving.RequestEvent{Client: t.sess.login.InitiatorName,
		Number: number, Op: op, Bytes: moved, Duration: now - t.started, Status: status})
}
