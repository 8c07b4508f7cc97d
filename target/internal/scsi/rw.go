package scsi

import (
	"encoding/binary"

	"kubevirt.io/disk/internal/rangelock"
)

// address takes address and length from a CDB, by its command's layout, and checks them against the
// capacity.
func (t *Task) address() error {
	cdb := &t.CDB
	switch t.cmd.layout {
	case cdb6:
		t.lba = uint64(binary.BigEndian.Uint32(cdb[0:]) & 0x1fffff)
		t.count = uint64(cdb[4])
		if t.count == 0 {
			t.count = 256 // SBC-3 5.11: the 6-byte commands have no empty transfer
		}
		return t.inRange()
	case cdb10:
		t.lba = uint64(binary.BigEndian.Uint32(cdb[2:]))
		t.count = uint64(binary.BigEndian.Uint16(cdb[7:]))
	case cdb12:
		t.lba = uint64(binary.BigEndian.Uint32(cdb[2:]))
		t.count = uint64(binary.BigEndian.Uint32(cdb[6:]))
	case cdb16:
		t.lba = binary.BigEndian.Uint64(cdb[2:])
		t.count = uint64(binary.BigEndian.Uint32(cdb[10:]))
	}
	return t.inRange()
}

func (t *Task) inRange() error { return t.unit.checkRange(t.lba, t.count) }

// checkRange refuses a range outside of the capacity. An empty range needs a valid address, too.
func (u *unit) checkRange(lba, count uint64) error {
	blocks := u.blocks()
	if lba >= blocks {
		return outOfRange(lba)
	}
	if count > blocks-lba {
		return outOfRange(blocks)
	}
	return nil
}

// limited refuses a command with more blocks than a limit of VPD page B0h.
func (t *Task) limited(limit uint64) error {
	if t.count <= limit {
		return nil
	}
	return invalidField(t.cmd.layout.lengthField(), 7)
}

// lengthField is the offset of the transfer length in the CDB.
func (l layout) lengthField() int {
	switch l {
	case cdb6:
		return 4
	case cdb10:
		return 7
	case cdb12:
		return 6
	}
	return 10
}

// transfer validates a command that moves all its blocks.
func (t *Task) transfer() error {
	if err := t.address(); err != nil {
		return err
	}
	if err := t.limited(maxTransfer >> t.unit.shift); err != nil {
		return err
	}
	t.Length = t.length()
	return nil
}

// prepareRead is READ(6), (10), (12) and (16) (SBC-3 5.11 to 5.14). FUA changes nothing: a read
// always returns the latest write.
func prepareRead(t *Task) error {
	if err := t.transfer(); err != nil {
		return err
	}
	if t.Length > 0 {
		t.Dir = DirIn
	}
	return nil
}

func inRead(t *Task, off int64, p []byte) error { return t.readDisk(t.off()+off, p) }

// readDisk reads from the disk. It waits for an exclusive command on the same range.
func (t *Task) readDisk(off int64, p []byte) error {
	_, err := t.ReadWhole(t.unit.served, p, off)
	return err
}

// prepareWrite is WRITE(6), (10), (12) and (16) (SBC-3 5.37 to 5.40).
func prepareWrite(t *Task) error {
	if err := t.transfer(); err != nil {
		return err
	}
	t.fua = t.cmd.layout != cdb6 && t.CDB[1]&bitFUA != 0
	if t.Length > 0 {
		t.Dir = DirOut
	}
	return nil
}

func outWrite(t *Task, off int64, p []byte) error {
	off += t.off()
	if len(p)&(t.unit.blockSize()-1) != 0 {
		return t.writeOffered(off, p, (*Task).writeDisk)
	}
	// This is writeOffered for whole blocks, without a call of a function value: nearly every write
	// comes here, and such a call costs measurable time.
	if err := t.lockRange(rangelock.Write, off, int64(len(p))); err != nil {
		return err
	}
	defer t.unit.Ranges.Unlock(&t.Hold)
	return t.writeDisk(p, off)
}

// writeOffered calls write for the blocks at byte off of the disk, and keeps other commands from
// changing them meanwhile. write gets whole blocks. The initiator may have expected a transfer that
// ends within a block: the rest of that block keeps its content.
func (t *Task) writeOffered(off int64, p []byte, write func(*Task, []byte, int64) error) error {
	size := t.unit.blockSize()
	whole := len(p) &^ (size - 1)
	length := int64(whole)
	if whole < len(p) {
		length += int64(size)
	}
	if err := t.lockRange(rangelock.Write, off, length); err != nil {
		return err
	}
	defer t.unit.Ranges.Unlock(&t.Hold)
	if whole > 0 {
		if err := write(t, p[:whole], off); err != nil {
			return err
		}
	}
	if whole == len(p) {
		return nil
	}
	return t.writeCut(off+int64(whole), p[whole:], write)
}

// writeCut calls write for a block of which p is only the beginning. The caller holds the block.
func (t *Task) writeCut(off int64, p []byte, write func(*Task, []byte, int64) error) error {
	block := make([]byte, t.unit.blockSize())
	if _, err := t.ReadAt(t.unit.served, block, off); err != nil {
		return t.failedAt(off, err)
	}
	copy(block, p)
	return write(t, block, off)
}

// writeDisk stores the initiator's data. The caller holds the range.
func (t *Task) writeDisk(p []byte, off int64) error {
	n, err := t.WriteAt(t.unit.served, p, off)
	if err == nil {
		return nil
	}
	return t.failedAt(off+int64(n), err)
}

// failedAt is the error of a write that has stored everything before byte off of the disk.
func (t *Task) failedAt(off int64, err error) error {
	return &writeError{err: err, stored: off, durably: t.writesThrough()}
}

// writeError is the error of a failed write. The cause may be a read that the write needed.
type writeError struct {
	err     error
	stored  int64 // the disk has the new data before this offset
	durably bool  // the initiator wanted durable data, and the new data is not durable yet
}

func (e *writeError) Error() string { return e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// finishWrite makes a write durable if the initiator wants that before the status: with FUA, or
// with the write cache off.
func finishWrite(t *Task) (Status, error) {
	if t.moved == 0 || !t.writesThrough() {
		return StatusGood, nil
	}
	return t.flush()
}

func (t *Task) writesThrough() bool { return t.fua || !t.unit.mode.writeBack() }

func (t *Task) flush() (Status, error) {
	if err := t.unit.Disk.Flush(); err != nil {
		return StatusCheckCondition, err
	}
	return StatusGood, nil
}
