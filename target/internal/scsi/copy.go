package scsi

import (
	"encoding/binary"

	"kubevirt.io/disk/serving"
)

// EXTENDED COPY copies blocks within a logical unit or from one to another, without moving them
// through the initiator. It names the logical units by their designators of VPD page 83h. This file
// has the command as a whole. copylist.go reads its parameter list, copysegment.go moves the
// blocks, copystate.go keeps the state that RECEIVE COPY RESULTS (copyresults.go) reports, and
// copysense.go makes the sense data of failures.

// The operation codes and service actions (SPC-4 annex).
const (
	opExtendedCopy = 0x83
	opReceiveCopy  = 0x84

	saExtendedCopyLID1 = 0x00
	saCopyStatus       = 0x00
	saCopyParameters   = 0x03
)

// copyCommands are the commands of the copy manager, which every logical unit has (SPC-4 5.17).
// They conflict with every reservation of the unit that receives them. Each unit in the copy then
// decides whether it allows its part (see copier.admit).
func copyCommands() []command {
	return []command{
		{name: "EXTENDED COPY(LID1)", opcode: opExtendedCopy, hasAction: true,
			action: saExtendedCopyLID1, usage: copyUsage(0), timeout: drain,
			prepare: prepareExtendedCopy, out: outExtendedCopy},
		{name: "RECEIVE COPY STATUS(LID1)", opcode: opReceiveCopy, hasAction: true,
			action: saCopyStatus, usage: copyUsage(0xff), timeout: quick,
			prepare: prepareCopyStatus},
		{name: "RECEIVE COPY OPERATING PARAMETERS", opcode: opReceiveCopy, hasAction: true,
			action: saCopyParameters, usage: copyUsage(0xff), timeout: quick,
			prepare: prepareCopyParameters},
	}
}

// copyUsage is the usage map of these commands: a length, and for some a list identifier.
func copyUsage(listID byte) []byte {
	return []byte{0, 0, listID, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0}
}

// Limits that we report in RECEIVE COPY OPERATING PARAMETERS and VPD page 8Fh, and that we enforce.
const (
	maxCopyTargets  = 8  // CSCD descriptors
	maxCopySegments = 64 // segment descriptors
	// bytes of all descriptors
	maxCopyList      = maxCopyTargets*copyTargetLen + maxCopySegments*copySegmentLen
	maxSegmentBlocks = 0xffff
	// concurrent commands of the whole device; each has a buffer of scratchSize
	maxCopies         = 16
	maxCopyParameters = 64 << 10
)

// prepareExtendedCopy is EXTENDED COPY(LID1) (SPC-4 6.5). An empty parameter list copies nothing.
func prepareExtendedCopy(t *Task) error {
	n := int64(binary.BigEndian.Uint32(t.CDB[10:]))
	// parseCopyList refuses a list that is too long. This limit only bounds its memory until then.
	if n > 0 && n < copyHeaderLen || n > maxCopyParameters {
		return errParameterLength
	}
	t.expect(n, true)
	return nil
}

func outExtendedCopy(t *Task, _ int64, p []byte) error {
	list, err := parseCopyList(p)
	if err == nil {
		err = t.checkCopyTargets(&list)
	}
	if err != nil {
		return err
	}
	op, err := t.beginCopy(&list)
	if err != nil {
		return err
	}
	ended := false
	defer func() {
		if !ended { // a disk has panicked: the session ends, so free the copy's place
			t.Abort()
			t.endCopy(op, true)
		}
	}()
	failure := t.copySegments(op, &list)
	t.endCopy(op, failure != nil)
	ended = true
	if failure != nil {
		return failure
	}
	return nil
}

// checkCopyTargets refuses an initiator that assumes another block length than a unit has, and so
// means other blocks.
func (t *Task) checkCopyTargets(list *copyList) error {
	for i := range list.targets {
		target := &list.targets[i]
		u := t.dev.copyUnit(t.unit, target)
		if u == nil {
			u = t.unit
		}
		if target.peripheral == peripheralDisk && target.blockSize != u.blockSize() {
			return invalidParameter(copyHeaderLen+i*copyTargetLen+29, 7)
		}
	}
	return nil
}

// copySegments executes the segment descriptors in order. STR asks for this order. Without STR any
// order is allowed.
func (t *Task) copySegments(op *copyOperation, list *copyList) *senseError {
	c := copier{t: t, op: op, own: participant{unit: t.unit, resets: t.unit.resets.Load()}}
	c.targets = make([]participant, len(list.targets))
	for i := range list.targets {
		if u := t.dev.copyUnit(t.unit, &list.targets[i]); u != nil {
			c.targets[i] = participant{unit: u, resets: u.resets.Load()}
		}
	}
	c.list = list
	c.buf = scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(c.buf)
	for i := range list.segments {
		op.segments.Store(uint32(i) + 1)
		if failure := c.segment(i); failure != nil {
			return failure
		}
	}
	return nil
}

// copyUnit returns the logical unit that a CSCD descriptor designates, or nil. own is the unit that
// received the command.
func (d *Device) copyUnit(own *unit, target *copyTarget) *unit {
	switch {
	case !target.isNAA:
		return nil
	case own.Identity.NAA == target.naa:
		return own
	}
	for _, u := range d.luns.Load().units {
		if u.Identity.NAA == target.naa {
			return u
		}
	}
	return nil
}

// Additional sense codes that only EXTENDED COPY uses.
const (
	ascOperationInProgress additional = 0x0016
	ascUnreachableTarget   additional = 0x0804
	ascThirdPartyFailure   additional = 0x0d01
	ascTargetNotReachable  additional = 0x0d02
	ascIncorrectTargetType additional = 0x0d03
	ascTooManyTargets      additional = 0x2606
	ascUnsupportedTarget   additional = 0x2607
	ascTooManySegments     additional = 0x2608
	ascUnsupportedSegment  additional = 0x2609
	ascInlineDataLength    additional = 0x260b
)

// sksSegment is SD: the field pointer is relative to the segment descriptor (SPC-4 4.5.2.4.5).
const sksSegment = 0x20

// copyAborted is the sense data of a copy that fails because of a field in a segment descriptor.
func copyAborted(code additional, field int) *senseError {
	return &senseError{key: CopyAborted, code: code, sks: fieldPointer(sksSegment, field, 7)}
}

// failed makes the sense data of a segment that failed after written of total bytes. The residual
// counts the blocks from the first one that was not written. It is reported only if something was
// written. The sense data does not say what failed at which unit: an initiator then copies by
// itself.
func (c *copier) failed(cause *copyCause, written, total int64, backwards bool) *senseError {
	if cause.err == serving.ErrAborted {
		return errAborted
	}
	// The result of Outcome is not used. But Outcome logs the fault, and notes trouble of the
	// unit's disk. A READ or WRITE there that succeeds ends the trouble.
	cmd := *c.t.cmd
	cmd.op = cause.op
	c.t.dev.Outcome(&Task{Nexus: c.t.Nexus, unit: cause.unit, cmd: &cmd}, cause.err, nil)
	s := &senseError{key: CopyAborted, code: ascThirdPartyFailure}
	if written > 0 {
		if backwards {
			written = 0
		}
		s.hasInfo, s.info = true, uint64(total-written)>>c.shift
	}
	return s
}
