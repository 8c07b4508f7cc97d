package pdu

import "fmt"

// FieldError is a header or an additional header segment that the standard forbids whatever the
// session's state is. Its framing is sound: the data segment can be skipped and the PDU answered by
// a Reject (RFC 7143 7.7).
type FieldError struct {
	Opcode Opcode // what the PDU was decoded as
	Field  string
	Why    string
}

func (e *FieldError) Error() string {
	return fmt.Sprintf("%v PDU: %s %s", e.Opcode, e.Field,
		e.Why)
}

// expect checks the opcode, and that there are additional header segments only where they may be:
// in a SCSI Command (RFC 7143 11.2.1.5). Reserved bits are not looked at, as a later standard may
// use them.
func (h *Header) expect(op Opcode) error {
	if got := h.Opcode(); got != op {
		return &FieldError{op, "opcode", "is that of " + got.String()}
	}
	if h.AHSLen() != 0 && op != OpSCSICommand {
		return &FieldError{op, "TotalAHSLength",
			"is not 0, and only a SCSI Command has additional header segments"}
	}
	return nil
}

// expectFinal is expect for a PDU that is always its own sequence, so that the F bit is always 1.
func (h *Header) expectFinal(op Opcode) error {
	if err := h.expect(op); err != nil {
		return err
	}
	if !h.Final() {
		return &FieldError{op, "F bit", "is 0, and must be 1"}
	}
	return nil
}

// expectBare is expectFinal for a PDU without a data segment.
func (h *Header) expectBare(op Opcode) error {
	if err := h.expectFinal(op); err != nil {
		return err
	}
	if h.DataLen() != 0 {
		return &FieldError{op, "DataSegmentLength", "is not 0, and this PDU has no data segment"}
	}
	return nil
}

// expectTaskTag refuses the reserved task tag where a task begins (RFC 7143 11.2.1.8).
func (h *Header) expectTaskTag(op Opcode) error {
	if h.TaskTag() == ReservedTag {
		return &FieldError{op, "initiator task tag", "is the reserved value"}
	}
	return nil
}
