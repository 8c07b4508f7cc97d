package scsi

import "kubevirt.io/disk/serving"

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
// written. What failed at which unit is for people: an initiator copies itself then.
func (c *copier) failed(cause *copyCause, written, total int64, backwards bool) *senseError {
	if cause.err == serving.ErrAborted {
		return errAborted
	}
	// Nobody needs this answer. But Outcome logs the fault, and notes trouble of the unit's disk. A
	// READ or WRITE there that succeeds ends the trouble.
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
