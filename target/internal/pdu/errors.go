package pdu

import "fmt"

// FieldError reports a header or additional header segment that the standard forbids in every state
// of the session. Its framing is sound, so the data segment can be skipped and the PDU answered
// with a Reject (RFC 7143 7.7).
type FieldError struct {
	Opcode Opcode // the type that the PDU was decoded as
	Field  string
	Why    string
}

func (e *FieldError) Error() string {
	return fmt.Sprintf("%v PDU: %s %s", e.Opcode, e.Field, e.Why)
}

// expect checks the opcode. It also checks that only a SCSI Command has additional header segments
// (RFC 7143 11.2.1.5). It ignores reserved bits, because a later standard may use them.
func (h *Header) expect(op Opcode) error {
	if got := h.Opcode(); got != op {
		return &FieldError{op, "opcode", "is that of " + got.String()}
	}
	if h.AHSLen() != 0 && op != OpSCSICommand {
		return &FieldError{op, "TotalAHSLength",
			"is not 0, but only a SCSI Command has additional header segments"}
	}
	return nil
}

// expectFinal is expect for a PDU that is a sequence of its own: the F bit must be 1.
func (h *Header) expectFinal(op Opcode) error {
	if err := h.expect(op); err != nil {
		return err
	}
	if !h.Final() {
		return &FieldError{op, "F bit", "is 0 but must be 1"}
	}
	return nil
}

// expectBare is expectFinal for a PDU without a data segment.
func (h *Header) expectBare(op Opcode) error {
	if err := h.expectFinal(op); err != nil {
		return err
	}
	if h.DataLen() != 0 {
		return &FieldError{op, "DataSegmentLength", "is not 0, but this PDU has no data segment"}
	}
	return nil
}

// expectTaskTag refuses the reserved task tag in a PDU that starts a task (RFC 7143 11.2.1.8).
func (h *Header) expectTaskTag(op Opcode) error {
	if h.TaskTag() == ReservedTag {
		return &FieldError{op, "initiator task tag", "is the reserved value"}
	}
	return nil
}
