package scsi

import (
	"bytes"
	"cmp"
	"encoding/binary"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
)

// prepareWriteSame is WRITE SAME(10) and (16) (SBC-3 5.44, 5.45). Zero blocks mean all blocks up to
// the end, still limited by the MAXIMUM WRITE SAME LENGTH of VPD page B0h.
func prepareWriteSame(t *Task) error {
	if err := t.address(); err != nil {
		return err
	}
	t.count = cmp.Or(t.count, t.unit.blocks()-t.lba)
	if err := t.limited(maxWriteSame >> t.unit.shift); err != nil {
		return err
	}
	if !t.withoutData() {
		t.expect(int64(t.unit.blockSize()), true)
	}
	return t.exactly(t.cmd.layout.lengthField())
}

// withoutData reports NDOB: the initiator sends no data, and the block is all zeros.
func (t *Task) withoutData() bool { return t.cmd.layout == cdb16 && t.CDB[1]&bitNDOB != 0 }

func outWriteSame(t *Task, _ int64, p []byte) error { return t.writeSame(p) }

func finishWriteSame(t *Task) (Status, error) {
	if t.withoutData() {
		if err := t.writeSame(zeros[:t.unit.blockSize()]); err != nil {
			return StatusCheckCondition, err
		}
		t.moved = t.length()
	}
	return finishWrite(t)
}

// zeros is the longest block of zeros.
var zeros [disk.LongBlock]byte

// writeSame fills the range with copies of block. With UNMAP it unmaps blocks only if block is all
// zeros, because unmapped blocks read as zeros (SBC-3 5.44: LBPRZ).
func (t *Task) writeSame(block []byte) error {
	u := t.unit
	if err := t.lockRange(rangelock.Write, t.off(), t.length()); err != nil {
		return err
	}
	defer u.Ranges.Unlock(&t.Hold)
	if bytes.Equal(block, zeros[:len(block)]) {
		switch {
		case t.CDB[1]&bitUnmap != 0:
			return t.Discard(u.served, t.off(), t.length())
		case u.Zeroes != nil:
			return t.Zero(u.served, t.off(), t.length())
		}
	}
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	pattern := buf[:min(scratchSize, t.length())]
	for n := copy(pattern, block); n < len(pattern); n *= 2 {
		copy(pattern[n:], pattern[:n])
	}
	for at := int64(0); at < t.length(); at += scratchSize {
		if err := t.stillWanted(); err != nil {
			return err
		}
		if err := t.writeDisk(pattern[:min(scratchSize, t.length()-at)], t.off()+at); err != nil {
			return err
		}
	}
	return nil
}

// lba16 returns the address in a 16-byte CDB.
func lba16(cdb *[16]byte) uint64 { return binary.BigEndian.Uint64(cdb[2:]) }
