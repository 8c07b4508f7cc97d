package pdu

// R2T asks the initiator for data of a command (RFC 7143 11.8).
type R2T struct {
	LUN                        uint64
	TaskTag, TransferTag       uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
	R2TSN                      uint32 // within the command
	BufferOffset               uint32 // bytes
	DesiredLength              uint32 // bytes, never 0
}

// Decode reads a header.
func (p *R2T) Decode(h *Header) error {
	if err := h.expectBare(OpR2T); err != nil {
		return err
	}
	*p = R2T{LUN: h.u64(8), TaskTag: h.u32(16), TransferTag: h.u32(20), StatSN: h.u32(24),
		ExpCmdSN: h.u32(28),
		MaxCmdSN: h.u32(32), R2TSN: h.u32(36), BufferOffset: h.u32(40), DesiredLength: h.u32(44)}
	switch {
	case p.DesiredLength == 0:
		return &FieldError{OpR2T, "desired data transfer length", "is 0"}
	case p.TransferTag == ReservedTag:
		return &FieldError{OpR2T, "target transfer tag", "is the reserved value"}
	}
	return nil
}

// Encode writes a header.
func (p *R2T) Encode(h *Header) {
	h.start(OpR2T, false, 0)
	h[1] = bitFinal
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h.put32(36, p.R2TSN)
	h.put32(40, p.BufferOffset)
	h.put32(44, p.DesiredLength)
}
