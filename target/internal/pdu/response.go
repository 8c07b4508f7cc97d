package pdu

// Bits of byte 1 in a SCSI Response and a Data-In.
const (
	bitOverflow    = 0x04
	bitUnderflow   = 0x02
	bitStatus      = 0x01
	bitAcknowledge = 0x40
)

// SCSIResponse ends a command (RFC 7143 11.4, RFC 7144 5.2).
type SCSIResponse struct {
	Overflow, Underflow bool
	Response            uint8 // 0: completed at the target
	Status              uint8 // SAM-5 status code
	// more about the status; 0 below protocol level 2 (RFC 7144 5.2.1)
	StatusQualifier            uint16
	TaskTag                    uint32
	SNACKTag                   uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
	ExpDataSN                  uint32 // how many Data-In PDUs the command had
	Residual                   uint32 // bytes
	DataLen                    int    // of the sense data with its length field, bytes
}

// Decode reads a header.
func (p *SCSIResponse) Decode(h *Header) error {
	if err := h.expectFinal(OpSCSIResponse); err != nil {
		return err
	}
	*p = SCSIResponse{Overflow: h[1]&bitOverflow != 0, Underflow: h[1]&bitUnderflow != 0,
		Response: h[2], Status: h[3], StatusQualifier: h.u16(8), TaskTag: h.u32(16),
		SNACKTag: h.u32(20), StatSN: h.u32(24), ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32),
		ExpDataSN: h.u32(36), Residual: h.u32(44), DataLen: h.DataLen()}
	switch {
	case p.Overflow && p.Underflow:
		return &FieldError{OpSCSIResponse, "O and U bits", "are both 1"}
	case p.Response != 0 && (p.Overflow || p.Underflow):
		return &FieldError{OpSCSIResponse, "residual bits",
			"are 1, but the command was not completed at the target"}
	}
	return nil
}

// Encode writes a header.
func (p *SCSIResponse) Encode(h *Header) {
	h.start(OpSCSIResponse, false, p.DataLen)
	h[1] = bitFinal
	h.setBit(1, bitOverflow, p.Overflow)
	h.setBit(1, bitUnderflow, p.Underflow)
	h[2], h[3] = p.Response, p.Status
	h.put16(8, p.StatusQualifier)
	h.put32(16, p.TaskTag)
	h.put32(20, p.SNACKTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h.put32(36, p.ExpDataSN)
	h.put32(44, p.Residual)
}
