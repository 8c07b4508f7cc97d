package scsi

import (
	"encoding/binary"
	"errors"
)

// Limits of WRITE ATOMIC that VPD page B0h reports, in logical blocks: whole physical blocks, and no more than one
// buffer.
const (
	maxAtomic         = 256
	atomicGranularity = granularity
)

// prepareWriteAtomic is WRITE ATOMIC(16) (SBC-4 5.48). There is no atomic boundary: the write is one.
func prepareWriteAtomic(t *Task) error {
	t.lba, t.count = lba16(&t.CDB), uint64(binary.BigEndian.Uint16(t.CDB[12:]))
	if err := t.inRange(); err != nil {
		return err
	}
	switch {
	case t.lba%atomicGranularity != 0:
		return invalidField(2, 7)
	case t.count > maxAtomic, t.count%atomicGranularity != 0:
		return invalidField(12, 7)
	}
	t.fua = t.CDB[1]&bitFUA != 0
	t.expect(t.length(), true)
	return t.exactly(12)
}

// outWriteAtomic writes all blocks or none. The range is held exclusively, so that no other command sees a part of it,
// and what was there is put back when the disk fails in the middle.
func outWriteAtomic(t *Task, _ int64, p []byte) error {
	u := t.unit
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	before := buf[:len(p)]
	u.ranges.lockOne(&t.hold, holdExclusive, t.Nexus.initiator, t.off(), t.length())
	defer u.ranges.unlock(&t.hold)
	if _, err := u.disk.ReadAt(before, t.off()); err != nil {
		return err
	}
	if _, err := u.disk.WriteAt(p, t.off()); err != nil {
		if _, undo := u.disk.WriteAt(before, t.off()); undo != nil {
			return errors.Join(err, undo)
		}
		return err
	}
	return nil
}
