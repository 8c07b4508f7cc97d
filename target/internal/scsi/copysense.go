package scsi

import (
	"encoding/binary"

	"kubevirt.io/disk/serving"
)

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

// copyFailure is the additional sense data of a failed EXTENDED COPY (SPC-4 6.4.1.3).
type copyFailure struct {
	segment uint16
	// Status and sense data of the unit that failed, as an initiator would get them; nil: none.
	source, dest []byte
}

// sksSegment is SD: the field pointer is relative to the segment descriptor (SPC-4 4.5.2.4.5).
const sksSegment = 0x20

// copyAborted is the sense data of a copy that fails because of a field in a segment descriptor.
func copyAborted(code additional, segment, field int) *senseError {
	return &senseError{key: CopyAborted, code: code, sks: fieldPointer(sksSegment, field, 7),
		failure: &copyFailure{segment: uint16(segment)}}
}

// failed makes the sense data of a segment that failed after written of total bytes. The residual
// counts the blocks from the first one that was not written. It is reported only if something was
// written.
func (c *copier) failed(segment int, cause *copyCause, written, total int64,
	backwards bool) *senseError {
	if cause.err == serving.ErrAborted {
		return errAborted
	}
	failure := &copyFailure{segment: uint16(segment)}
	s := &senseError{key: CopyAborted, code: ascThirdPartyFailure, failure: failure}
	if cause.source != nil {
		failure.source = c.delivered(cause.source, cause.err)
	} else {
		failure.dest = c.delivered(cause.dest, cause.err)
	}
	if written > 0 {
		if backwards {
			written = 0
		}
		s.hasInfo, s.info = true, uint64(total-written)>>c.shift
	}
	return s
}

// delivered returns the status byte and the sense data with which a unit failed.
func (c *copier) delivered(u *unit, err error) []byte {
	status, sense := c.t.dev.Outcome(&Task{Nexus: c.t.Nexus, unit: u, cmd: c.t.cmd}, err, nil)
	return append([]byte{byte(status)}, sense...)
}

// appendFixed completes fixed format sense data. Its COMMAND-SPECIFIC INFORMATION field holds the
// offsets where status and sense data of source and destination begin, and the segment number.
func (f *copyFailure) appendFixed(s []byte) []byte {
	if f.source != nil {
		s[8] = byte(len(s))
		s = append(s, f.source...)
	}
	if f.dest != nil {
		s[9] = byte(len(s))
		s = append(s, f.dest...)
	}
	binary.BigEndian.PutUint16(s[10:], f.segment)
	s[7] = byte(len(s) - 8)
	return s
}

// appendSegment appends the command-specific information descriptor (SPC-4 4.5.2.3), with the
// segment number at the same place as in the fixed format.
func (f *copyFailure) appendSegment(b []byte) []byte {
	b = append(b, 0x01, 0x0a, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, f.segment)
	return append(b, 0, 0, 0, 0)
}

// appendForwarded appends forwarded sense data descriptors (SPC-4 4.5.2.7).
func (f *copyFailure) appendForwarded(b []byte) []byte {
	const ofSource, ofDest = 1, 2
	if f.source != nil {
		b = append(append(b, 0x0c, byte(len(f.source)+1), ofSource), f.source...)
	}
	if f.dest != nil {
		b = append(append(b, 0x0c, byte(len(f.dest)+1), ofDest), f.dest...)
	}
	return b
}
