package scsi

import (
	"encoding/binary"
	"math"
)

// copyAllocation is the allocation length of the RECEIVE COPY RESULTS commands.
func (t *Task) copyAllocation() uint32 { return binary.BigEndian.Uint32(t.CDB[10:]) }

// Values of COPY MANAGER STATUS.
const (
	copyInProgress = 0x00
	copyGood       = 0x01
	copyFailed     = 0x02
)

// copyCountKiB is a value of TRANSFER COUNT UNITS; zero means bytes.
const copyCountKiB = 0x01

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
	written := op.bytes.Load()
	if written > math.MaxUint32 { // in long blocks
		b[7], written = copyCountKiB, written>>10
	}
	binary.BigEndian.PutUint32(b[8:], uint32(written))
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
	b[4] = 0x01 // SNLID: a list need not have an identifier
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

// The descriptors of VPD page 8Fh (SPC-4 7.8.17).
const (
	copyPageCommands    = 0x0001
	copyPageParameters  = 0x0004
	copyPageDescriptors = 0x0008
	copyPageTargetIDs   = 0x000c
	copyPageGeneral     = 0x8001
)

// appendThirdPartyCopy is page 8Fh (SPC-4 7.8.17).
func appendThirdPartyCopy(t *Task, b []byte) []byte {
	be := binary.BigEndian
	commands := []byte{opExtendedCopy, 1, saExtendedCopyLID1, opReceiveCopy, 2, saCopyStatus,
		saCopyParameters}
	b = appendCopyDescriptor(b, copyPageCommands, append([]byte{byte(len(commands))}, commands...))

	var parameters [28]byte
	be.PutUint16(parameters[4:], maxCopyTargets)
	be.PutUint16(parameters[6:], maxCopySegments)
	be.PutUint32(parameters[8:], maxCopyList)
	b = appendCopyDescriptor(b, copyPageParameters, parameters[:])

	b = appendCopyDescriptor(b, copyPageDescriptors,
		append([]byte{byte(len(copyDescriptors))}, copyDescriptors[:]...))
	b = appendCopyDescriptor(b, copyPageTargetIDs, []byte{0, 2, ownTarget >> 8, ownTarget & 0xff})

	var general [32]byte
	be.PutUint32(general[0:], maxCopies)
	be.PutUint32(general[4:], maxCopies)
	be.PutUint32(general[8:], maxSegmentBlocks<<t.unit.shift)
	general[12] = byte(t.unit.shift)
	return appendCopyDescriptor(b, copyPageGeneral, general[:])
}

// appendCopyDescriptor appends a third-party copy descriptor, padded to a multiple of four bytes.
func appendCopyDescriptor(b []byte, kind uint16, value []byte) []byte {
	for len(value)%4 != 0 {
		value = append(value, 0)
	}
	b = binary.BigEndian.AppendUint16(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(value)))
	return append(b, value...)
}
