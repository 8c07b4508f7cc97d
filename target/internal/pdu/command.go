package pdu

// TaskAttr is the task attribute of a command (RFC 7143 11.3.1).
type TaskAttr uint8

// The task attributes.
const (
	TaskAttrUntagged TaskAttr = iota
	TaskAttrSimple
	TaskAttrOrdered
	TaskAttrHeadOfQueue
	TaskAttrACA
)

const (
	bitRead  = 0x40
	bitWrite = 0x20
	attrMask = 0x07
)

// SCSICommand carries a CDB (RFC 7143 11.3, RFC 7144 5.1).
type SCSICommand struct {
	Immediate      bool
	Final          bool // no unsolicited Data-Out follows
	Read, Write    bool // the direction of the data that the initiator expects
	Attr           TaskAttr
	Priority       uint8 // with the simple attribute: 1 to 15; 0: none (RFC 7144 5.1.1)
	LUN            uint64
	TaskTag        uint32
	ExpectedLength uint32 // Expected Data Transfer Length, bytes
	CmdSN          uint32
	ExpStatSN      uint32
	CDB            [16]byte
	AHSLen         int // bytes
	DataLen        int // of the immediate data, bytes
}

// Decode reads a header.
func (p *SCSICommand) Decode(h *Header) error {
	if err := h.expect(OpSCSICommand); err != nil {
		return err
	}
	*p = SCSICommand{Immediate: h.Immediate(), Final: h.Final(), Read: h[1]&bitRead != 0,
		Write: h[1]&bitWrite != 0, Attr: TaskAttr(h[1] & attrMask), Priority: h[2] >> 4,
		LUN: h.u64(8), TaskTag: h.u32(16), ExpectedLength: h.u32(20), CmdSN: h.u32(24),
		ExpStatSN: h.u32(28), CDB: [16]byte(h[32:48]), AHSLen: h.AHSLen(), DataLen: h.DataLen()}
	return h.expectTaskTag(OpSCSICommand)
}

// Encode writes a header.
func (p *SCSICommand) Encode(h *Header) {
	h.start(OpSCSICommand, p.Immediate, p.DataLen)
	h.setBit(1, bitFinal, p.Final)
	h.setBit(1, bitRead, p.Read)
	h.setBit(1, bitWrite, p.Write)
	h[1] |= byte(p.Attr) & attrMask
	h[2] = p.Priority << 4
	h.SetAHSLen(p.AHSLen)
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.ExpectedLength)
	h.put32(24, p.CmdSN)
	h.put32(28, p.ExpStatSN)
	copy(h[32:], p.CDB[:])
}
