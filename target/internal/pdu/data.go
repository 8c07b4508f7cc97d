package pdu

// DataOut carries data for a command, with or without an R2T asking for it (RFC 7143 11.7).
type DataOut struct {
	Final        bool // the last of its sequence
	LUN          uint64
	TaskTag      uint32
	TransferTag  uint32 // of the R2T; ReservedTag: unsolicited
	ExpStatSN    uint32
	DataSN       uint32 // within the sequence
	BufferOffset uint32 // bytes
	DataLen      int    // bytes
}

// Decode reads a header.
func (p *DataOut) Decode(h *Header) error {
	if err := h.expect(OpDataOut); err != nil {
		return err
	}
	*p = DataOut{Final: h.Final(), LUN: h.u64(8), TaskTag: h.u32(16), TransferTag: h.u32(20),
		ExpStatSN: h.u32(28), DataSN: h.u32(36), BufferOffset: h.u32(40), DataLen: h.DataLen()}
	return nil
}

// Encode writes a header.
func (p *DataOut) Encode(h *Header) {
	h.start(OpDataOut, false, p.DataLen)
	h.setBit(1, bitFinal, p.Final)
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(28, p.ExpStatSN)
	h.put32(36, p.DataSN)
	h.put32(40, p.BufferOffset)
}

// DataIn carries data of a command to the initiator. The last one may also carry good status (RFC
// 7143 11.7).
type DataIn struct {
	Final                      bool // the last of its sequence
	Acknowledge                bool
	Overflow, Underflow        bool // with HasStatus
	HasStatus                  bool
	Status                     uint8 // with HasStatus
	LUN                        uint64
	TaskTag                    uint32
	TransferTag                uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32 // StatSN with HasStatus
	DataSN                     uint32 // within the command
	BufferOffset               uint32 // bytes
	Residual                   uint32 // bytes, with HasStatus
	DataLen                    int    // bytes
}

// Decode reads a header.
func (p *DataIn) Decode(h *Header) error {
	if err := h.expect(OpDataIn); err != nil {
		return err
	}
	*p = DataIn{Final: h.Final(), Acknowledge: h[1]&bitAcknowledge != 0,
		HasStatus: h[1]&bitStatus != 0, LUN: h.u64(8), TaskTag: h.u32(16), TransferTag: h.u32(20),
		ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32), DataSN: h.u32(36), BufferOffset: h.u32(40),
		DataLen: h.DataLen()}
	if p.HasStatus { // without it these fields have no meaning (RFC 7143 11.7.3)
		p.Overflow, p.Underflow = h[1]&bitOverflow != 0, h[1]&bitUnderflow != 0
		p.Status, p.StatSN, p.Residual = h[3], h.u32(24), h.u32(44)
	}
	switch {
	case p.HasStatus && !p.Final:
		return &FieldError{OpDataIn, "S bit", "is 1 without the F bit"}
	case p.Acknowledge && p.TransferTag == ReservedTag:
		return &FieldError{OpDataIn, "target transfer tag",
			"is the reserved value with the A bit 1"}
	case p.Overflow && p.Underflow:
		return &FieldError{OpDataIn, "O and U bits", "are both 1"}
	}
	return nil
}

// Encode writes a header.
func (p *DataIn) Encode(h *Header) {
	h.start(OpDataIn, false, p.DataLen)
	h.setBit(1, bitFinal, p.Final)
	h.setBit(1, bitAcknowledge, p.Acknowledge)
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.TransferTag)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h.put32(36, p.DataSN)
	h.put32(40, p.BufferOffset)
	if p.HasStatus {
		h.setBit(1, bitStatus, true)
		h.setBit(1, bitOverflow, p.Overflow)
		h.setBit(1, bitUnderflow, p.Underflow)
		h[3] = p.Status
		h.put32(24, p.StatSN)
		h.put32(44, p.Residual)
	}
}

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
