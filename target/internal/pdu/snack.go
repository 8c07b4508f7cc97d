package pdu

// SNACKRequest asks the target to send PDUs again. At error recovery level 0 we do not (RFC 7143
// 11.16).
type SNACKRequest struct {
	Type                 uint8
	LUN                  uint64
	TaskTag, TransferTag uint32
	ExpStatSN            uint32
	BegRun, RunLength    uint32
}

// Decode reads a header.
func (p *SNACKRequest) Decode(h *Header) error {
	if err := h.expectBare(OpSNACKRequest); err != nil {
		return err
	}
	*p = SNACKRequest{Type: h[1] & 0x0f, LUN: h.u64(8), TaskTag: h.u32(16), TransferTag: h.u32(20),
		ExpStatSN: h.u32(28),
		BegRun:    h.u32(40), RunLength: h.u32(44)}
	return nil
}

// Encode writes a header.
func (p *SNACKRequest) Encode(h *Header) {
	h.start(OpSNACKRequest, false, 0)
	h[1] = bitFinal | p.Type&0x0f
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(28, p.ExpStatSN)
	h.put32(40, p.BegRun)
	h.put32(44, p.RunLength)
}
