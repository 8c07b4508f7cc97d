package scsi

import "encoding/binary"

// EXTENDED COPY copies blocks from one logical unit to another, or within one, without moving them
// through the initiator. It names the logical units by their designators of VPD page 83h. This file
// has the command as a whole; copylist.go reads its parameter list, copysegment.go moves the
// blocks, copystate.go keeps what RECEIVE COPY RESULTS (copyresults.go) tells, and copysense.go
// says what has failed.

// The operation codes and service actions (SPC-4 annex).
const (
	opExtendedCopy = 0x83
	opReceiveCopy  = 0x84

	saExtendedCopyLID1 = 0x00
	saCopyStatus       = 0x00
	saCopyParameters   = 0x03
	saCopyFailure      = 0x04
)

// copyCommands are those of the copy manager, which every logical unit has (SPC-4 5.17). They
// conflict with every reservation of the unit that they are sent to; what a copy does to the units
// that it names is asked of those.
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
		{name: "RECEIVE COPY FAILURE DETAILS(LID1)", opcode: opReceiveCopy, hasAction: true,
			action: saCopyFailure, usage: copyUsage(0xff), timeout: quick,
			prepare: prepareCopyFailure},
	}
}

// copyUsage is the usage of these commands: a length, and the list identifier where there is one.
func copyUsage(listID byte) []byte {
	return []byte{0, 0, listID, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0}
}

// Limits that RECEIVE COPY OPERATING PARAMETERS and VPD page 8Fh report, and that are enforced.
const (
	// CSCD descriptors
	maxCopyTargets = 8
	// segment descriptors
	maxCopySegments = 64
	// of all descriptors, bytes
	maxCopyList      = maxCopyTargets*copyTargetLen + maxCopySegments*copySegmentLen
	maxSegmentBlocks = 0xffff
	// commands under way at once in the whole device: each has a buffer of scratchSize
	maxCopies         = 16
	maxCopyParameters = 64 << 10
)

// prepareExtendedCopy is EXTENDED COPY(LID1) (SPC-4 6.5). A parameter list of no bytes copies
// nothing.
func prepareExtendedCopy(t *Task) error {
	n := int64(binary.BigEndian.Uint32(t.CDB[10:]))
	// The descriptors' lengths are in the list, so that a list that is too long is refused when
	// they are read, but memory is not given for just any length.
	if n > 0 && n < copyHeaderLen || n > maxCopyParameters {
		return errParameterLength
	}
	t.expect(n, true)
	return nil
}

func outExtendedCopy(t *Task, _ int64, p []byte) error {
	list, err := parseCopyList(p)
	if err != nil {
		return err
	}
	op, err := t.beginCopy(&list)
	if err != nil {
		return err
	}
	ended := false
	defer func() {
		if !ended { // a disk has panicked: the session ends, and the place is free again
			t.Abort()
			t.endCopy(op, nil)
		}
	}()
	failure := t.copySegments(op, &list)
	t.endCopy(op, failure)
	ended = true
	if failure != nil {
		return failure
	}
	return nil
}

// copySegments carries out the segment descriptors in their order, which STR asks for and its
// absence allows.
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

// copyUnit finds the logical unit that a CSCD descriptor designates; nil if there is none here. own
// is the one that the command was sent to.
func (d *Device) copyUnit(own *unit, target *copyTarget) *unit {
	switch {
	case !target.isNAA:
		return nil
	case own.identity.NAA == target.naa:
		return own
	}
	for _, u := range d.luns.Load().units {
		if u.identity.NAA == target.naa {
			return u
		}
	}
	return nil
}
