// Package pdu is the wire format of iSCSI: the basic header segment, and for each opcode one struct
// that is decoded from it and encoded to it (RFC 7143 11). It checks lengths and fields but does
// not know what they mean to a session. Only the parser of additional header segments allocates.
//
// Every PDU begins with a basic header segment (BHS) of 48 bytes, big-endian:
//
//	byte  0      1 immediate bit (0x40) and opcode (0x3f)
//	      1-3    opcode-specific; byte 1 bit 0x80 is mostly F, the final bit
//	      4      TotalAHSLength, 4-byte words
//	      5-7    DataSegmentLength, bytes without padding
//	      8-15   LUN, or opcode-specific (ISID and TSIH in login)
//	      16-19  Initiator Task Tag
//	      20-47  opcode-specific; of a target's PDUs mostly
//	             20 Target Transfer Tag, 24 StatSN, 28 ExpCmdSN, 32 MaxCmdSN
//
// Additional header segments, the header digest, the data segment (padded to a multiple of 4 bytes)
// and the data digest follow, if they are present.
package pdu

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// HeaderLen is the length of the basic header segment, in bytes.
const HeaderLen = 48

// MaxDataLen is the longest data segment that a header can announce, in bytes.
const MaxDataLen = 1<<24 - 1

// ReservedTag is the task tag or transfer tag that stands for none.
const ReservedTag uint32 = 0xffffffff

const (
	bitImmediate = 0x40
	opcodeMask   = 0x3f
	bitFinal     = 0x80
	bitContinue  = 0x40
)

// Opcode is the kind of a PDU (RFC 7143 11.2.1.2).
type Opcode uint8

// The opcodes. Initiators send those up to 0x1f, targets those from 0x20.
const (
	OpNOPOut                 Opcode = 0x00
	OpSCSICommand            Opcode = 0x01
	OpTaskManagementRequest  Opcode = 0x02
	OpLoginRequest           Opcode = 0x03
	OpTextRequest            Opcode = 0x04
	OpDataOut                Opcode = 0x05
	OpLogoutRequest          Opcode = 0x06
	OpSNACKRequest           Opcode = 0x10
	OpNOPIn                  Opcode = 0x20
	OpSCSIResponse           Opcode = 0x21
	OpTaskManagementResponse Opcode = 0x22
	OpLoginResponse          Opcode = 0x23
	OpTextResponse           Opcode = 0x24
	OpDataIn                 Opcode = 0x25
	OpLogoutResponse         Opcode = 0x26
	OpR2T                    Opcode = 0x31
	OpAsyncMessage           Opcode = 0x32
	OpReject                 Opcode = 0x3f
)

var opcodeNames = map[Opcode]string{
	OpNOPOut: "NOP-Out", OpSCSICommand: "SCSI Command",
	OpTaskManagementRequest: "Task Management Request",
	OpLoginRequest:          "Login Request", OpTextRequest: "Text Request",
	OpDataOut:       "SCSI Data-Out",
	OpLogoutRequest: "Logout Request", OpSNACKRequest: "SNACK Request", OpNOPIn: "NOP-In",
	OpSCSIResponse: "SCSI Response", OpTaskManagementResponse: "Task Management Response",
	OpLoginResponse: "Login Response", OpTextResponse: "Text Response", OpDataIn: "SCSI Data-In",
	OpLogoutResponse: "Logout Response", OpR2T: "Ready To Transfer",
	OpAsyncMessage: "Asynchronous Message",
	OpReject:       "Reject",
}

func (o Opcode) String() string { return enumName(opcodeNames, o) }

// enumName is the name of an enum value, or its number if it has no name.
func enumName[T ~uint8](names map[T]string, v T) string {
	if s, ok := names[v]; ok {
		return s
	}
	return fmt.Sprintf("0x%02x", uint8(v))
}

// Header is a basic header segment as it is on the wire.
type Header [HeaderLen]byte

// Opcode is the kind of PDU.
func (h *Header) Opcode() Opcode { return Opcode(h[0] & opcodeMask) }

// Immediate is the I bit of a request.
func (h *Header) Immediate() bool { return h[0]&bitImmediate != 0 }

// Final is the F bit.
func (h *Header) Final() bool { return h[1]&bitFinal != 0 }

// AHSLen is the length of all additional header segments, in bytes; at most 1020.
func (h *Header) AHSLen() int { return int(h[4]) * 4 }

// DataLen is the length of the data segment, in bytes without padding; at most MaxDataLen.
func (h *Header) DataLen() int { return int(h[5])<<16 | int(h[6])<<8 | int(h[7]) }

// PaddedDataLen is the length of the data segment with its padding, in bytes.
func (h *Header) PaddedDataLen() int { return (h.DataLen() + 3) &^ 3 }

// SetAHSLen sets the length of the additional header segments, in bytes: a multiple of 4, at most
// 1020.
func (h *Header) SetAHSLen(n int) { h[4] = byte(n / 4) }

// SetDataLen sets the length of the data segment, in bytes.
func (h *Header) SetDataLen(n int) { h[5], h[6], h[7] = byte(n>>16), byte(n>>8), byte(n) }

// LUN is the LUN field of a request that has one.
func (h *Header) LUN() uint64 { return h.u64(8) }

// TaskTag is the initiator task tag.
func (h *Header) TaskTag() uint32 { return h.u32(16) }

// CmdSN is the CmdSN of a request that has one.
func (h *Header) CmdSN() uint32 { return h.u32(24) }

// Numbered says whether a PDU in full feature phase uses up its CmdSN. It does if it is a request
// other than Data-Out and SNACK, which have no CmdSN, and is not immediate (RFC 7143 4.2.2.1).
func (h *Header) Numbered() bool {
	switch h.Opcode() {
	case OpNOPOut, OpSCSICommand, OpTaskManagementRequest, OpTextRequest, OpLogoutRequest:
		return !h.Immediate()
	}
	return false
}

func (h *Header) u16(off int) uint16      { return binary.BigEndian.Uint16(h[off:]) }
func (h *Header) u32(off int) uint32      { return binary.BigEndian.Uint32(h[off:]) }
func (h *Header) u64(off int) uint64      { return binary.BigEndian.Uint64(h[off:]) }
func (h *Header) put16(off int, v uint16) { binary.BigEndian.PutUint16(h[off:], v) }
func (h *Header) put32(off int, v uint32) { binary.BigEndian.PutUint32(h[off:], v) }
func (h *Header) put64(off int, v uint64) { binary.BigEndian.PutUint64(h[off:], v) }
func (h *Header) setBit(off int, mask byte, on bool) {
	if on {
		h[off] |= mask
	}
}

// start clears the header and writes opcode, immediate bit and data length.
func (h *Header) start(op Opcode, immediate bool, dataLen int) {
	*h = Header{byte(op)}
	h.setBit(0, bitImmediate, immediate)
	h.SetDataLen(dataLen)
}

var errAHSTruncated = &FieldError{OpSCSICommand, "additional header segment",
	"runs past TotalAHSLength"}

// CheckAHS checks that additional header segments end where the header says (RFC 7143 11.2.2).
// Their content is ignored: no command has a CDB of more than 16 bytes or moves data in both
// directions.
//
//	byte 0-1  AHSLength: bytes after the type, reserved byte included
//	     2    AHSType
//	     3    reserved, then the rest, padded to a multiple of 4
func CheckAHS(b []byte) error {
	const headerLen = 3 // AHSLength and AHSType
	for len(b) > 0 {
		if len(b) < headerLen {
			return errAHSTruncated
		}
		n := headerLen + int(binary.BigEndian.Uint16(b))
		if n > len(b) {
			return errAHSTruncated
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Digest is the CRC32C of the segments as if they were one (RFC 7143 13.1).
func Digest(segments ...[]byte) uint32 {
	var d uint32
	for _, s := range segments {
		d = crc32.Update(d, castagnoli, s)
	}
	return d
}

// UpdateDigest continues a digest; start with 0.
func UpdateDigest(d uint32, p []byte) uint32 { return crc32.Update(d, castagnoli, p) }

// PutDigest writes a digest as it is on the wire: the reflected CRC, lowest byte first (RFC 7143
// 13.1, appendix A).
func PutDigest(p []byte, d uint32) { binary.LittleEndian.PutUint32(p, d) }

// AppendDigest appends a digest in the same form.
func AppendDigest(dst []byte, d uint32) []byte { return binary.LittleEndian.AppendUint32(dst, d) }

// SNLess says whether serial number a comes before b, modulo 2^32 (RFC 7143 4.2.2, RFC 1982). Two
// numbers that are exactly 2^31 apart have no order: each comes before the other. No window here is
// that wide.
func SNLess(a, b uint32) bool { return int32(a-b) < 0 }
