package target

import (
	"encoding/binary"
	"fmt"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// LUNs come and go while the server runs. A command keeps the disk that its LUN had when the
// command arrived, so it never reaches another disk that gets the number later. The table of LUNs
// is in internal/scsi/inventory.go. This file tells initiators about changes, and answers commands
// that hang in the disk of a removed LUN.

// front is the server as a front end of the disks in use.
type front struct{ *Server }

// Added implements serving.Front. All initiators learn that the list of LUNs has changed, by an
// asynchronous message and by a unit attention (3F/0E) at the next command to each LUN. An
// initiator that has used another disk under the number gets LOGICAL UNIT NOT SUPPORTED until it
// has probed the LUN again: see scsi.Task.probed.
func (f front) Added(d *serving.Disk) error {
	if d.Number == 0 {
		return fmt.Errorf("a LUN number is 1 to %d", serving.MaxNumber)
	}
	s := f.Server
	if s.conns.Closing() {
		return ErrServerClosed
	}
	tell, err := s.device.Take(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		return err
	}
	s.tellLocked(d.Number, tell)
	return nil
}

// Removed implements serving.Front. New commands to the LUN end with LOGICAL UNIT NOT SUPPORTED
// (05/25/00). So do commands under way, except those whose disk call ends now. A command that waits
// for data ends when its data has come, as RFC 7143 11.4.2 requires. A command that hangs in the
// disk ends at once. The LUN's reservations and other state of its initiators end with it.
// Initiators are notified as by Added.
func (f front) Removed(d *serving.Disk) {
	s := f.Server
	tell, taken := s.device.Drop(d)
	if !taken {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tellLocked(d.Number, tell)
	select {
	case <-d.Released():
		return
	default:
	}
	s.conns.Go(func() { s.endRemoved(d) }) // if it is closed, commands end with their sessions
}

func (f front) Resized(d *serving.Disk) { f.device.Grew(d) }

func (f front) Protected(d *serving.Disk) { f.device.Protected(d) }

// Shared implements serving.Front. Initiators see no difference.
func (f front) Shared(*serving.Disk) {}

func (f front) Bars(d *serving.Disk, write bool) error { return f.device.Bars(d, write) }

func (f front) Holders(d *serving.Disk) []string { return f.device.ReservationHolders(d) }

func (f front) Fence(d *serving.Disk, fenced func(string) bool) (serving.Fencing, error) {
	return f.device.Fence(d, fenced)
}

// tellLocked sends an asynchronous message with a SCSI event (RFC 7143 11.9.1): REPORTED LUNS DATA
// HAS CHANGED. By the standard a target may send it only if its INQUIRY data says that it reports
// events, but since SPC-3 INQUIRY has no such bit. We send it because a unit attention comes only
// with the next command, and an initiator may have none to send. open-iscsi then looks for LUNs;
// libiscsi (QEMU) ignores the message. Each initiator gets one message until it asks for the list.
// So an initiator that ignores them does not get more and more.
func (s *Server) tellLocked(lun uint16, tell map[*scsi.Nexus]struct{}) {
	for _, sess := range s.sessions {
		if _, ok := tell[sess.nexus]; !ok || !sess.open.Load() {
			continue
		}
		b := s.pool.Must(maxSense)
		_, sense := s.device.Outcome(nil, scsi.ErrLUNsChanged, b.B[2:2])
		binary.BigEndian.PutUint16(b.B, uint16(len(sense)))
		b.B = b.B[:2+len(sense)]
		p := pdu.AsyncMessage{LUN: scsi.EncodeLUN(lun), Event: pdu.AsyncSCSI, DataLen: len(b.B)}
		sess.conn.tx.send(&p, snAdvance, b.B, b)
		sess.conn.flushSoon() // the session is registered, so its reader has not ended
	}
}

// endRemoved answers commands that hang in the disk of a removed LUN, until the disk is released.
func (s *Server) endRemoved(d *serving.Disk) {
	d.UntilReleased(s.ctx, func() {
		for _, sess := range s.normalSessions() {
			sess.endRemoved()
		}
	})
}

// endRemoved answers the session's commands that hang in the disk of a removed LUN. In each of them
// a reader has lost its role. Readers execute commands only when all data is there, so no data is
// under way when the tag is free again.
func (s *session) endRemoved() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	for _, t := range s.tasks {
		if t.state == taskExecuting && t.owner != nil && t.owner.Lost() && t.scsi.Removed() {
			s.answerLocked(t, scsi.ErrRemoved)
		}
	}
}

// answerLocked answers a command instead of the goroutine that works on it. That goroutine goes on
// as for an aborted command.
func (s *session) answerLocked(t *task, cause error) {
	c := s.conn
	b := c.srv.pool.Must(maxSense)
	status, sense := c.srv.device.Outcome(nil, cause, b.B[2:2])
	binary.BigEndian.PutUint16(b.B, uint16(len(sense)))
	b.B = b.B[:2+len(sense)]
	resp := pdu.SCSIResponse{Status: uint8(status), TaskTag: t.tag, ExpDataSN: t.snIn,
		DataLen: len(b.B)}
	// Count no byte of a write as written.
	resp.Overflow, resp.Underflow, resp.Residual = differ(t.sent, max(t.expectIn, t.expectOut))
	s.abortLocked(t)
	c.tx.respond(&resp, 0, b.B, b)
	c.flushSoon() // the goroutine that works on the command has not ended
}
