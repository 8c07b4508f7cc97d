package target

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// LUNs come and go while the server runs. A command keeps the disk that its LUN had when it
// arrived, so it never reaches another disk that gets the number later. The table is in
// internal/scsi/inventory.go. This file has the transport's part: it tells initiators about
// changes, and answers commands that hang in the disk of a removed LUN.

// front is the server as a front end of the disks in use.
type front struct{ *Server }

// Added implements serving.Front.
func (f front) Added(d *serving.Disk) error {
	s, watch := f.Server, &lunWatch{number: d.Number}
	s.mu.Lock()
	s.watchLocked(append(slices.Clone(*s.watch.luns.Load()), watch)) // before any command
	s.mu.Unlock()
	tell, err := s.device.Take(d, watch)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.unwatchLocked(watch)
		return err
	}
	s.tellLocked(d.Number, tell)
	return nil
}

// Removed implements serving.Front. Commands that hang in the disk are answered meanwhile.
func (f front) Removed(d *serving.Disk) {
	s := f.Server
	tell, host := s.device.Drop(d)
	watch, ok := host.(*lunWatch)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tellLocked(d.Number, tell)
	select {
	case <-d.Released():
		s.unwatchLocked(watch)
		return
	default:
	}
	if !s.closing { // otherwise its commands end with their sessions
		s.wg.Add(1)
		go s.endRemoved(d.Released(), watch)
	}
}

// Resized implements serving.Front.
func (f front) Resized(d *serving.Disk) { f.device.Grew(d) }

// Protected implements serving.Front.
func (f front) Protected(d *serving.Disk) { f.device.Protected(d) }

// Holders implements serving.Front.
func (f front) Holders(d *serving.Disk) []string { return f.device.ReservationHolders(d) }

// Fence implements serving.Front.
func (f front) Fence(d *serving.Disk, fenced func(string) bool) (serving.Fencing, error) {
	return f.device.Fence(d, fenced)
}

// AddLUN serves one more disk. Its number must be free, and its identity must differ from those of
// all disks that are served. The server tells all initiators that the list of LUNs has changed, by
// an asynchronous message and by a unit attention (3F/0E) at the next command to each LUN. They
// find the disk when they ask for the list again.
//
// Another disk may have had the number before. If an initiator has used that disk, its commands get
// LOGICAL UNIT NOT SUPPORTED until it has probed the LUN again: see scsi.Task.probed.
func (s *Server) AddLUN(l LUN) error {
	if s.isClosing() {
		return ErrServerClosed
	}
	if err := check(&l); err != nil {
		return fmt.Errorf("target: %w", err)
	}
	return named(s.disks.Add(l))
}

// named says which part of the program an error comes from.
func named(err error) error {
	if err != nil {
		return fmt.Errorf("target: %w", err)
	}
	return nil
}

// RemoveLUN stops serving a disk. New commands to it end with LOGICAL UNIT NOT SUPPORTED
// (05/25/00). So do commands under way, except those that the disk finishes right now. A command
// that waits for data ends when its data has come, as RFC 7143 11.4.2 requires; a command that
// hangs in the disk ends at once. Commands of other initiators and to other LUNs do not wait for
// that. The LUN's reservations and other state of its initiators end with it. Initiators are told
// as by AddLUN.
//
// The number is free when RemoveLUN returns. The server uses the disk and its Store until released
// is closed: the caller must not close, change or serve them again before that. A call that hangs
// in the disk delays it for as long as it hangs.
func (s *Server) RemoveLUN(lun uint16) (released <-chan struct{}, err error) {
	released, err = s.disks.Remove(lun)
	return released, named(err)
}

// InUseError is the error of RemoveUnusedLUN: initiators use the LUN.
type InUseError = serving.InUseError

// RemoveUnusedLUN is RemoveLUN that removes nothing, and returns an *InUseError, if an initiator
// has read or written the LUN in a session that it still has, or holds a persistent reservation of
// it, with a session or without. A first command that comes in the same moment finds the LUN gone,
// or keeps it.
func (s *Server) RemoveUnusedLUN(lun uint16) (released <-chan struct{}, err error) {
	released, err = s.disks.RemoveUnused(lun)
	return released, named(err)
}

// ResizeLUN takes over the new size of a disk that has grown. A disk must not shrink. The server
// tells initiators by a unit attention (2A/09).
func (s *Server) ResizeLUN(lun uint16) error { return named(s.disks.Resize(lun)) }

func (s *Server) watchLocked(luns []*lunWatch) { s.watch.luns.Store(&luns) }

func (s *Server) unwatchLocked(watch *lunWatch) {
	luns := slices.Clone(*s.watch.luns.Load())
	s.watchLocked(slices.DeleteFunc(luns, func(l *lunWatch) bool { return l == watch }))
}

// tellLocked sends an asynchronous message with a SCSI event (RFC 7143 11.9.1): REPORTED LUNS DATA
// HAS CHANGED. By the standard a target may send it only if its INQUIRY data says that it reports
// events, but since SPC-3 INQUIRY has no such bit. We send it because a unit attention comes only
// with the next command, and an initiator may have none to send. open-iscsi then looks for LUNs;
// libiscsi (QEMU) ignores the message. Each initiator gets one message until it asks for the list,
// so one that does not care does not get any number of them.
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
		sess.conn.flushSoon() // the session is registered, so its reader has not ended
	}
}

// mostBetweenLooks is the longest time between two looks of endRemoved.
const mostBetweenLooks = time.Second

// endRemoved answers commands that hang in the disk of a removed LUN, as soon as it finds that they
// hang, until the disk is released.
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

// endRemoved answers the session's commands that hang in the disk of a removed LUN. A reader has
// lost its role in each of them. Readers execute commands only when all data is there, so no data
// is under way when the tag is free again.
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

// answerLocked answers a command instead of the goroutine that works on it. That goroutine goes on
// as for an aborted command.
func (s *session) answerLocked(t *task, cause error) {
	c := s.conn
	b := c.srv.pool.must(maxSense)
	status, sense := c.srv.device.Outcome(nil, cause, b.b[2:2])
	binary.BigEndian.PutUint16(b.b, uint16(len(sense)))
	b.b = b.b[:2+len(sense)]
	resp := pdu.SCSIResponse{Status: uint8(status), TaskTag: t.tag, ExpDataSN: t.snIn,
		DataLen: len(b.b)}
	// Nothing of a write counts as done.
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
