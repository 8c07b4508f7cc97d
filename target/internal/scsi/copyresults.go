package scsi

import "encoding/binary"

// copyAllocation is the allocation length of the RECEIVE COPY RESULTS commands.
func (t *Task) copyAllocation() uint32 { return binary.BigEndian.Uint32(t.CDB[10:]) }

// Values of COPY MANAGER STATUS.
const (
	copyInProgress = 0x00
	copyGood       = 0x01
	copyFailed     = 0x02
)

// prepareCopyStatus is RECEIVE COPY STATUS(LID1) (SPC-4). It reports the end of a copy only once.
func prepareCopyStatus(t *Task) error {
	d := t.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	op := t.Nexus.copyLocked(t.unit, t.CDB[2])
	if op == nil {
		return invalidField(2, 7)
	}
	var b [12]byte
	binary.BigEndian.PutUint32(b[0:], uint32(len(b)-4))
	switch {
	case op.task != nil:
		b[4] = copyInProgress
	case op.failed:
		b[4] = copyFailed
	default:
		b[4] = copyGood
	}
	binary.BigEndian.PutUint16(b[5:], uint16(op.segments.Load()))
	// TRANSFER COUNT UNITS is zero, which means bytes: all segments of a list together are below 4
	// GiB.
	binary.BigEndian.PutUint32(b[8:], uint32(op.bytes.Load()))
	if op.task == nil {
		t.Nexus.dropCopyLocked(op)
	}
	t.data = append(t.data[:0], b[:]...)
	t.reply(t.copyAllocation())
	return nil
}

// copyDescriptors are the descriptor types that EXTENDED COPY accepts, in ascending order.
var copyDescriptors = [...]byte{copySegmentBlocks, copyTargetIdentification}

// prepareCopyParameters is RECEIVE COPY OPERATING PARAMETERS (SPC-4). The list identifier is
// ignored.
func prepareCopyParameters(t *Task) error {
	var b [44]byte
	be := binary.BigEndian
	be.PutUint32(b[0:], uint32(len(b)-4+len(copyDescriptors)))
	b[4] = 0x01 // SNLID: a list may have no identifier
	be.PutUint16(b[8:], maxCopyTargets)
	be.PutUint16(b[10:], maxCopySegments)
	be.PutUint32(b[12:], maxCopyList)
	be.PutUint32(b[16:], maxSegmentBlocks<<t.unit.shift)
	be.PutUint16(b[34:], maxCopies)
	b[36] = maxCopies
	b[37] = byte(t.unit.shift) // data segment granularity
	b[43] = byte(len(copyDescriptors))
	t.data = append(append(t.data[:0], b[:]...), copyDescriptors[:]...)
	t.reply(t.copyAllocation())
	return nil
}
