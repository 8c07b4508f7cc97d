package target

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// LUNs come and go while the server runs. A command keeps the disk that it has found at its LUN
// when it arrived, so that it never reaches another one that has the number later;
// internal/scsi/inventory.go has the table. This file is what the transport adds: it tells
// initiators of a change, and answers the commands that hang in the disk of a LUN that was removed.

// unit is the LUN as the SCSI layer takes it.
func (l *LUN) unit(watch *lunWatch) scsi.LUN {
	return scsi.LUN{Number: l.Number, Disk: l.Disk, Identity: l.Identity, ReadOnly: l.ReadOnly,
		Removable: l.Removable, Access: l.Access, Volatile: l.Volatile, Grown: l.Grown,
		Store: l.Store,
		Host:  watch}
}

// AddLUN serves one more disk. Its number must be free, and its identity another one than that of
// every disk that is served. Initiators that are logged in are told that the list of LUNs has
// changed: by an asynchronous message, and by a unit attention (3F/0E) at the next command to each
// LUN. They find the disk when they ask for the list again.
//
// The number may have been another disk's before. An initiator that has used that one under this
// number meets LOGICAL UNIT NOT SUPPORTED until it has probed the LUN again: see scsi.Task.probed.
func (s *Server) AddLUN(l LUN) error {
	if s.isClosing() {
		return ErrServerClosed
	}
	if err := l.check(); err != nil {
		return fmt.Errorf("target: %w", err)
	}
	watch := &lunWatch{number: l.Number}
	s.mu.Lock()
	s.watchLocked(append(slices.Clone(*s.watch.luns.Load()), watch)) // before a command can come
	s.mu.Unlock()
	tell, err := s.device.Add(l.unit(watch))
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.unwatchLocked(watch)
		return fmt.Errorf("target: %w", err)
	}
	s.tellLocked(l.Number, tell)
	return nil
}

// RemoveLUN stops serving a disk. New commands to it end with LOGICAL UNIT NOT SUPPORTED
// (05/25/00). So do those that are under way, but for those that the disk is just about to carry
// out, which have their own answers: a command that waits for data when that has come, as RFC 7143
// 11.4.2 wants, and one that hangs in the disk at once. The other initiators' and LUNs' commands do
// not wait for any of that. All that the LUN has kept of its initiators ends with it. Initiators
// are told as by AddLUN.
//
// The number is free when RemoveLUN returns. The disk and its Store are not the server's any more
// when released is closed: they must not be closed, changed or served again before that. A call
// that hangs in the disk delays it for as long as it hangs.
func (s *Server) RemoveLUN(lun uint16) (released <-chan struct{}, err error) {
	removal, err := s.device.Remove(lun)
	if err != nil {
		return nil, fmt.Errorf("target: %w", err)
	}
	watch := removal.Host.(*lunWatch)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tellLocked(lun, removal.Tell)
	select {
	case <-removal.Released:
		s.unwatchLocked(watch)
		return removal.Released, nil
	default:
	}
	if !s.closing { // else its commands end with their sessions
		s.wg.Add(1)
		go s.endRemoved(removal.Released, watch)
	}
	return removal.Released, nil
}

// ResizeLUN takes up the size that a disk has by now: it may have grown while it is served, and not
// shrunk. Initiators are told by a unit attention (2A/09).
func (s *Server) ResizeLUN(lun uint16) error {
	if err := s.device.Resize(lun); err != nil {
		return fmt.Errorf("target: %w", err)
	}
	return nil
}

func (s *Server) watchLocked(luns []*lunWatch) { s.watch.luns.Store(&luns) }

func (s *Server) unwatchLocked(watch *lunWatch) {
	luns := slices.Clone(*s.watch.luns.Load())
	s.watchLocked(slices.DeleteFunc(luns, func(l *lunWatch) bool { return l == watch }))
}

// tellLocked sends an asynchronous message with a SCSI event (RFC 7143 11.9.1): REPORTED LUNS DATA
// HAS CHANGED. A target may send that where its INQUIRY data says that it reports events, which has
// had no place for it since SPC-3. It is sent all the same, as a unit attention comes with the next
// command only, and an initiator may have none: open-iscsi looks for LUNs when it comes, and
// libiscsi, QEMU's, passes over it. Each initiator gets one until it asks for the list, so that one
// that does not care is not sent any number of them.
func (s *Server) tellLocked(lun uint16, tell map[*scsi.Nexus]struct{}) {
	for _, sess := range s.sessions {
		if _, ok := tell[sess.nexus]; !ok || !sess.open.Load() {
			continue
		}
		b := s.pool.must(maxSense)
		_, sense := s.device.Outcome(nil, scsi.ErrLUNsChanged, b.b[2:2])
		binary.BigEndian.PutUint16(b.b, uint16(len(sense)))
		b.b = b.b[:2+len(sense)]
		p := pdu.AsyncMessage{LUN: scsi.EncodeLUN(lun), Event: pdu.AsyncSCSI, DataLen: len(b.b)}
		sess.conn.tx.send(&p, snAdvance, b.b, b)
		sess.conn.flushSoon() // the session is registered, so that its reader has not ended
	}
}

// mostBetweenLooks bounds how long endRemoved waits between two looks.
const mostBetweenLooks = time.Second

// endRemoved answers the commands that hang in the disk of a LUN that was removed, as soon as it
// shows that they do, until the disk is released.
func (s *Server) endRemoved(released <-chan struct{}, watch *lunWatch) {
	defer s.wg.Done()
	for wait := stallTick; ; wait = min(2*wait, mostBetweenLooks) {
		for _, sess := range s.normal() {
			sess.endRemoved()
		}
		select {
		case <-released:
			s.mu.Lock()
			defer s.mu.Unlock()
			s.unwatchLocked(watch)
			return
		case <-s.ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// endRemoved answers those of the session's commands that hang in the disk of a LUN that was
// removed. A reader has lost its role over each: all data of what it executes is there, so that
// none is on its way when the tag is free again.
func (s *session) endRemoved() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	for _, t := range s.tasks {
		if t.state == taskExecuting && t.owner != nil && t.owner.lost.Load() && t.scsi.Removed() {
			s.answerLocked(t, scsi.ErrRemoved)
		}
	}
}

// answerLocked ends a command with an answer in the place of the goroutine that works on it, which
// goes on as for one that was aborted.
func (s *session) answerLocked(t *task, cause error) {
	c := s.conn
	b := c.srv.pool.must(maxSense)
	status, sense := c.srv.device.Outcome(nil, cause, b.b[2:2])
	binary.BigEndian.PutUint16(b.b, uint16(len(sense)))
	b.b = b.b[:2+len(sense)]
	resp := pdu.SCSIResponse{Status: uint8(status), TaskTag: t.tag, ExpDataSN: t.snIn,
		DataLen: len(b.b)}
	// Of a write nothing counts as done.
	if t.bidi {
		resp.Overflow, resp.Underflow, resp.Residual = differ(0, t.expectOut)
		resp.BidiOverflow, resp.BidiUnderflow, resp.BidiResidual = differ(t.sent, t.expectIn)
	} else {
		resp.Overflow, resp.Underflow, resp.Residual = differ(t.sent, max(t.expectIn, t.expectOut))
	}
	s.abortLocked(t)
	c.tx.respond(&resp, 0, b.b, b)
	c.flushSoon() // the goroutine that works on the command has not ended
}
