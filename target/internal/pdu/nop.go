package pdu

// NOPOut is the initiator's ping, or its answer to the target's (RFC 7143 11.18).
type NOPOut struct {
	Immediate            bool
	LUN                  uint64
	TaskTag, TransferTag uint32
	CmdSN, ExpStatSN     uint32
	DataLen              int // bytes
}

// Decode reads a header. A PDU that asks for no answer must be immediate (RFC 7143 11.18.1). Decode
// does not check this: the session decides whether a PDU that is not immediate uses up its CmdSN.
func (p *NOPOut) Decode(h *Header) error {
	if err := h.expectFinal(OpNOPOut); err != nil {
		return err
	}
	*p = NOPOut{Immediate: h.Immediate(), LUN: h.u64(8), TaskTag: h.u32(16), TransferTag: h.u32(20),
		CmdSN: h.u32(24), ExpStatSN: h.u32(28), DataLen: h.DataLen()}
	return nil
}

// Encode writes a header.
func (p *NOPOut) Encode(h *Header) {
	h.start(OpNOPOut, p.Immediate, p.DataLen)
	h[1] = bitFinal
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(24, p.CmdSN)
	h.put32(28, p.ExpStatSN)
}

// NOPIn is the target's ping, or its answer to the initiator's (RFC 7143 11.19).
type NOPIn struct {
	LUN                        uint64
	TaskTag, TransferTag       uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
	DataLen                    int // bytes
}

// Decode reads a header.
func (p *NOPIn) Decode(h *Header) error {
	if err := h.expectFinal(OpNOPIn); err != nil {
		return err
	}
	*p = NOPIn{LUN: h.u64(8), TaskTag: h.u32(16), TransferTag: h.u32(20), StatSN: h.u32(24),
		ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32), DataLen: h.DataLen()}
	switch {
	case p.TaskTag == ReservedTag && p.DataLen != 0:
		return &FieldError{OpNOPIn, "DataSegmentLength",
			"is not 0, but this PDU does not answer a ping"}
	case p.TaskTag != ReservedTag && p.TransferTag != ReservedTag:
		return &FieldError{OpNOPIn, "target transfer tag", "is set in the answer to a ping"}
	}
	return nil
}

// Encode writes a header.
func (p *NOPIn) Encode(h *Header) {
	h.start(OpNOPIn, false, p.DataLen)
	h[1] = bitFinal
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
}
