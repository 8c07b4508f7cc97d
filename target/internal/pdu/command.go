package pdu

import "fmt"

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

var taskAttrNames = map[TaskAttr]string{TaskAttrUntagged: "untagged", TaskAttrSimple: "simple",
	TaskAttrOrdered: "ordered", TaskAttrHeadOfQueue: "head of queue", TaskAttrACA: "ACA"}

func (a TaskAttr) String() string { return enumName(taskAttrNames, a) }

const (
	bitRead  = 0x40
	bitWrite = 0x20
	attrMask = 0x07
)

// SCSICommand carries a CDB (RFC 7143 11.3).
type SCSICommand struct {
	Immediate      bool
	Final          bool // no unsolicited Data-Out follows
	Read, Write    bool // the direction of the data that the initiator expects
	Attr           TaskAttr
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
	*p = SCSICommand{Immediate: h.Immediate(), Final: h.Final(), Read: h[1]&bitRead != 0, Write: h[1]&bitWrite != 0,
		Attr: TaskAttr(h[1] & attrMask), LUN: h.u64(8), TaskTag: h.u32(16), ExpectedLength: h.u32(20), CmdSN: h.u32(24),
		ExpStatSN: h.u32(28), CDB: [16]byte(h[32:48]), AHSLen: h.AHSLen(), DataLen: h.DataLen()}
	if p.TaskTag == ReservedTag {
		return &FieldError{OpSCSICommand, "initiator task tag", "is the reserved value"}
	}
	return nil
}

// Encode writes a header.
func (p *SCSICommand) Encode(h *Header) {
	h.start(OpSCSICommand, p.Immediate, p.DataLen)
	h.setBit(1, bitFinal, p.Final)
	h.setBit(1, bitRead, p.Read)
	h.setBit(1, bitWrite, p.Write)
	h[1] |= byte(p.Attr) & attrMask
	h.SetAHSLen(p.AHSLen)
	h.put64(8, p.LUN)
	h.put32(16, p.TaskTag)
	h.put32(20, p.ExpectedLength)
	h.put32(24, p.CmdSN)
	h.put32(28, p.ExpStatSN)
	copy(h[32:], p.CDB[:])
}

func (p *SCSICommand) String() string {
	return fmt.Sprintf("SCSI Command tag=%#x lun=%#016x cdb=%x expected=%d read=%t write=%t final=%t immediate=%t attr=%v cmdsn=%d data=%d",
		p.TaskTag, p.LUN, p.CDB, p.ExpectedLength, p.Read, p.Write, p.Final, p.Immediate, p.Attr, p.CmdSN, p.DataLen)
}

// Bits of byte 1 of a SCSI Response and a Data-In.
const (
	bitBidiOverflow  = 0x10
	bitBidiUnderflow = 0x08
	bitOverflow      = 0x04
	bitUnderflow     = 0x02
	bitStatus        = 0x01
	bitAcknowledge   = 0x40
)

// SCSIResponse ends a command (RFC 7143 11.4).
type SCSIResponse struct {
	BidiOverflow, BidiUnderflow bool
	Overflow, Underflow         bool
	Response                    uint8 // 0: completed at the target
	Status                      uint8 // SAM-5 status code
	TaskTag                     uint32
	SNACKTag                    uint32
	StatSN, ExpCmdSN, MaxCmdSN  uint32
	ExpDataSN                   uint32 // how many R2T and Data-In PDUs the command had
	BidiResidual                uint32 // bytes
	Residual                    uint32 // bytes
	DataLen                     int    // of the sense data with its length, bytes
}

// Decode reads a header.
func (p *SCSIResponse) Decode(h *Header) error {
	if err := h.expectFinal(OpSCSIResponse); err != nil {
		return err
	}
	*p = SCSIResponse{BidiOverflow: h[1]&bitBidiOverflow != 0, BidiUnderflow: h[1]&bitBidiUnderflow != 0,
		Overflow: h[1]&bitOverflow != 0, Underflow: h[1]&bitUnderflow != 0, Response: h[2], Status: h[3], TaskTag: h.u32(16),
		SNACKTag: h.u32(20), StatSN: h.u32(24), ExpCmdSN: h.u32(28), MaxCmdSN: h.u32(32), ExpDataSN: h.u32(36),
		BidiResidual: h.u32(40), Residual: h.u32(44), DataLen: h.DataLen()}
	if p.Overflow && p.Underflow || p.BidiOverflow && p.BidiUnderflow {
		return &FieldError{OpSCSIResponse, "O and U bits", "are both 1"}
	}
	return nil
}

// Encode writes a header.
func (p *SCSIResponse) Encode(h *Header) {
	h.start(OpSCSIResponse, false, p.DataLen)
	h[1] = bitFinal
	h.setBit(1, bitBidiOverflow, p.BidiOverflow)
	h.setBit(1, bitBidiUnderflow, p.BidiUnderflow)
	h.setBit(1, bitOverflow, p.Overflow)
	h.setBit(1, bitUnderflow, p.Underflow)
	h[2], h[3] = p.Response, p.Status
	h.put32(16, p.TaskTag)
	h.put32(20, p.SNACKTag)
	h.put32(24, p.StatSN)
	h.put32(28, p.ExpCmdSN)
	h.put32(32, p.MaxCmdSN)
	h.put32(36, p.ExpDataSN)
	h.put32(40, p.BidiResidual)
	h.put32(44, p.Residual)
}

func (p *SCSIResponse) String() string {
	return fmt.Sprintf("SCSI Response tag=%#x response=%#x status=%#x overflow=%t underflow=%t residual=%d statsn=%d data=%d",
		p.TaskTag, p.Response, p.Status, p.Overflow, p.Underflow, p.Residual, p.StatSN, p.DataLen)
}
