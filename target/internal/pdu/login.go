package pdu

const (
	bitTransit = 0x80
	stageMask  = 0x03
	stageShift = 2
)

// LoginRequest carries keys of the login phase (RFC 7143 11.12).
type LoginRequest struct {
	Transit                bool
	Continue               bool
	CSG, NSG               uint8 // current and next stage
	VersionMax, VersionMin uint8
	ISID                   [6]byte
	TSIH                   uint16
	TaskTag                uint32
	CID                    uint16
	CmdSN, ExpStatSN       uint32
	DataLen                int // bytes
}

// Decode reads a header. It accepts stages and bits that contradict each other: the login refuses
// those, because it has a status for them. It ignores the I bit, because a Login Request always
// counts as immediate (RFC 7143 11.12).
func (p *LoginRequest) Decode(h *Header) error {
	if err := h.expect(OpLoginRequest); err != nil {
		return err
	}
	*p = LoginRequest{Transit: h[1]&bitTransit != 0, Continue: h[1]&bitContinue != 0,
		CSG: h[1] >> stageShift & stageMask, NSG: h[1] & stageMask, VersionMax: h[2],
		VersionMin: h[3], ISID: [6]byte(h[8:14]), TSIH: h.u16(14), TaskTag: h.u32(16),
		CID: h.u16(20), CmdSN: h.u32(24), ExpStatSN: h.u32(28), DataLen: h.DataLen()}
	return nil
}

// Encode writes a header.
func (p *LoginRequest) Encode(h *Header) {
	h.start(OpLoginRequest, true, p.DataLen)
	h.setBit(1, bitTransit, p.Transit)
	h.setBit(1, bitContinue, p.Continue)
	h[1] |= p.CSG&stageMask<<stageShift | p.NSG&stageMask
	h[2], h[3] = p.VersionMax, p.VersionMin
	copy(h[8:], p.ISID[:])
	h.put16(14, p.TSIH)
	h.put32(16, p.TaskTag)
	h.put16(20, p.CID)
	h.put32(24, p.CmdSN)
	h.put32(28, p.ExpStatSN)
}

// LoginResponse answers a LoginRequest (RFC 7143 11.13).
type LoginResponse struct {
	Transit, Continue          bool
	CSG, NSG                   uint8
	VersionMax, VersionActive  uint8
	ISID                       [6]byte
	TSIH                       uint16 // 0 except in the last one
	TaskTag                    uint32
	StatSN, ExpCmdSN, MaxCmdSN uint32
	StatusClass, StatusDetail  uint8
	DataLen                    int // bytes
}

// Decode reads a header.
func (p *LoginResponse) Decode(h *Header) error {
	if err := h.expect(OpLoginResponse); err != nil {
		return err
	}
	*p = LoginResponse{Transit: h[1]&bitTransit != 0, Continue: h[1]&bitContinue != 0,
		CSG: h[1] >> stageShift & stageMask, NSG: h[1] & stageMask, VersionMax: h[2],
		VersionActive: h[3], ISID: [6]byte(h[8:14]), TSIH: h.u16(14), TaskTag: h.u32(16),
		StatSN: h.u32(24), ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32), StatusClass: h[36],
		StatusDetail: h[37], DataLen: h.DataLen()}
	return nil
}

// Encode writes a header.
func (p *LoginResponse) Encode(h *Header) {
	h.start(OpLoginResponse, false, p.DataLen)
	h.setBit(1, bitTransit, p.Transit)
	h.setBit(1, bitContinue, p.Continue)
	h[1] |= p.CSG&stageMask<<stageShift | p.NSG&stageMask
	h[2], h[3] = p.VersionMax, p.VersionActive
	copy(h[8:], p.ISID[:])
	h.put16(14, p.TSIH)
	h.put32(16, p.TaskTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h[36], h[37] = p.StatusClass, p.StatusDetail
}
