package pdu

// TextRequest carries keys in full feature phase (RFC 7143 11.10).
type TextRequest struct {
	Immediate            bool
	Final, Continue      bool
	LUN                  uint64
	TaskTag, TransferTag uint32
	CmdSN, ExpStatSN     uint32
	DataLen              int // bytes
}

// Decode reads a header.
func (p *TextRequest) Decode(h *Header) error {
	if err := h.expect(OpTextRequest); err != nil {
		return err
	}
	*p = TextRequest{Immediate: h.Immediate(), Final: h.Final(), Continue: h[1]&bitContinue != 0,
		LUN: h.u64(8), TaskTag: h.u32(16), TransferTag: h.u32(20), CmdSN: h.u32(24),
		ExpStatSN: h.u32(28), DataLen: h.DataLen()}
	if p.Final && p.Continue {
		return &FieldError{OpTextRequest, "F and C bits", "are both 1"}
	}
	return h.expectTaskTag(OpTextRequest)
}

// Encode writes a header.
func (p *TextRequest) Encode(h *Header) {
	h.start(OpTextRequest, p.Immediate, p.DataLen)
	h.setBit(1, bitFinal, p.Final)
	h.setBit(1, bitContinue, p.Continue)
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(24, p.CmdSN)
	h.put32(28, p.ExpStatSN)
}

// TextResponse answers a TextRequest (RFC 7143 11.11).
type TextResponse struct {
	Final, Continue            bool
	LUN                        uint64
	TaskTag, TransferTag       uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
	DataLen                    int // bytes
}

// Decode reads a header.
func (p *TextResponse) Decode(h *Header) error {
	if err := h.expect(OpTextResponse); err != nil {
		return err
	}
	*p = TextResponse{Final: h.Final(), Continue: h[1]&bitContinue != 0, LUN: h.u64(8),
		TaskTag: h.u32(16), TransferTag: h.u32(20),
		StatSN: h.u32(24), ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32), DataLen: h.DataLen()}
	switch {
	case p.Final && p.Continue:
		return &FieldError{OpTextResponse, "F and C bits", "are both 1"}
	case p.Final != (p.TransferTag == ReservedTag):
		return &FieldError{OpTextResponse, "target transfer tag",
			"must be the reserved value if, and only if, the F bit is 1"}
	}
	return nil
}

// Encode writes a header.
func (p *TextResponse) Encode(h *Header) {
	h.start(OpTextResponse, false, p.DataLen)
	h.setBit(1, bitFinal, p.Final)
	h.setBit(1, bitContinue, p.Continue)
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
}
