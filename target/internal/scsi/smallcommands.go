package scsi

import (
	"encoding/binary"
	"math"
)

// Bits of byte 4 of START STOP UNIT (SBC-3 5.20).
const (
	powerConditionMask = 0xf0
	bitNoFlush         = 0x04
	bitLOEJ            = 0x02
	bitStart           = 0x01
)

// onlyStarts reports whether a START STOP UNIT does no more than make the unit ready (SBC-3 4.17).
func onlyStarts(cdb *[16]byte) bool { return cdb[4]&(powerConditionMask|bitStart) == bitStart }

// prepareStartStop validates START STOP UNIT. There is no medium to load or to eject. With a power
// condition, START and LOEJ are ignored.
func prepareStartStop(t *Task) error {
	if request := t.CDB[4]; request&powerConditionMask == 0 && request&bitLOEJ != 0 {
		return invalidField(4, 1)
	}
	return nil
}

// finishStartStop is START STOP UNIT. There is no spindle and there are no power conditions, so the
// unit does not change. Stopping it flushes.
func finishStartStop(t *Task) (Status, error) {
	if t.CDB[4]&(powerConditionMask|bitStart|bitNoFlush) == 0 {
		return t.flush()
	}
	return StatusGood, nil
}

const bitDESC = 0x01

// prepareRequestSense is REQUEST SENSE (SPC-4 6.39). Each status carries its own sense data, so
// only unit attentions can be pending. It takes the one with the highest precedence.
func prepareRequestSense(t *Task) error {
	sense := &senseError{}
	if t.unit == nil {
		sense = errLUNNotSupported
	} else if pending := t.at.take(); pending != nil {
		sense = pending
	}
	t.data = sense.appendTo(t.data[:0], t.CDB[1]&bitDESC != 0)
	t.reply(uint32(t.CDB[4]))
	return nil
}

// physicalShift says that a physical block has 4 KiB, the page of the host.
const physicalShift = 12

// prepareReadCapacity10 is READ CAPACITY(10) (SBC-3 5.15).
func prepareReadCapacity10(t *Task) error {
	last := min(t.unit.blocks()-1, math.MaxUint32)
	t.data = binary.BigEndian.AppendUint32(t.data[:0], uint32(last))
	t.data = binary.BigEndian.AppendUint32(t.data, uint32(t.unit.blockSize()))
	t.reply(uint32(len(t.data)))
	return nil
}

// prepareReadCapacity16 is READ CAPACITY(16) (SBC-3 5.16).
func prepareReadCapacity16(t *Task) error {
	var b [32]byte
	binary.BigEndian.PutUint64(b[0:], t.unit.blocks()-1)
	binary.BigEndian.PutUint32(b[8:], uint32(t.unit.blockSize()))
	b[13] = byte(physicalShift - t.unit.shift) // logical blocks in a physical one, as a power of 2
	if t.unit.Discards != nil {
		b[14] = 0x80 | 0x40 // LBPME, LBPRZ
	}
	t.data = append(t.data[:0], b[:]...)
	t.reply(binary.BigEndian.Uint32(t.CDB[10:]))
	return nil
}

// preparePrefetch is PRE-FETCH(10) and (16) (SBC-3 5.9). Zero blocks mean all blocks up to the end.
func preparePrefetch(t *Task) error {
	if err := t.address(); err != nil {
		return err
	}
	if t.count == 0 {
		t.count = t.unit.blocks() - t.lba
	}
	return nil
}

// finishPrefetch reads at most one transfer length ahead. It returns GOOD. CONDITION MET would
// promise that the data stays, but the host's page cache may drop it at any time. With IMMED the
// initiator does not wait, so nothing is read.
func finishPrefetch(t *Task) (Status, error) {
	if t.CDB[1]&bitImmed != 0 {
		return StatusGood, nil
	}
	t.count = min(t.count, maxTransfer>>t.unit.shift)
	if err := t.forEachChunk(func(int64, []byte) error { return nil }); err != nil {
		return StatusCheckCondition, err
	}
	return StatusGood, nil
}

// prepareSync is SYNCHRONIZE CACHE(10) and (16) (SBC-3 5.25). Zero blocks mean all blocks up to the
// end.
func prepareSync(t *Task) error { return t.address() }

// finishSync flushes the whole disk, which covers any range. With IMMED the standard allows the
// status before the flush. The status still comes after the flush, so that it never claims too
// much.
func finishSync(t *Task) (Status, error) { return t.flush() }
