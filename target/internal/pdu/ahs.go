package pdu

import "encoding/binary"

// The types of additional header segments (RFC 7143 11.2.2.1).
const (
	ahsExtendedCDB = 1
	ahsBidiLength  = 2

	ahsTypeMask  = 0x3f
	ahsHeaderLen = 3 // AHSLength and AHSType
)

// maxExtendedCDB is how many bytes of a variable-length CDB follow its first 16. Such a CDB has 8
// bytes up to its additional length field, and at most 252 after it (SPC-4 4.2.3).
const maxExtendedCDB = 8 + 252 - 16

// AHS is the content of a command's additional header segments.
type AHS struct {
	ExtendedCDB    []byte // the CDB's bytes after the first 16; shares the parsed memory
	HasBidi        bool
	BidiReadLength uint32 // bytes
}

var (
	errAHSTruncated = &FieldError{OpSCSICommand, "additional header segment",
		"runs past TotalAHSLength"}
	errAHSTwice = &FieldError{OpSCSICommand, "additional header segment",
		"comes twice with the same type"}
	errAHSLength = &FieldError{OpSCSICommand, "AHSLength", "is not allowed for the type"}
)

// ParseAHS reads the additional header segments of a SCSI Command (RFC 7143 11.2.2). It skips
// unknown types.
//
//	byte 0-1  AHSLength: bytes after the type, reserved byte included
//	     2    AHSType
//	     3    reserved, then the rest, padded to a multiple of 4
func ParseAHS(b []byte) (AHS, error) {
	var a AHS
	for len(b) > 0 {
		if len(b) < ahsHeaderLen {
			return AHS{}, errAHSTruncated
		}
		n, kind := int(binary.BigEndian.Uint16(b)), b[2]&ahsTypeMask
		if ahsHeaderLen+n > len(b) {
			return AHS{}, errAHSTruncated
		}
		var body []byte // after the reserved byte, which AHSLength counts
		if n > 0 {
			body = b[ahsHeaderLen+1 : ahsHeaderLen+n]
		}
		switch kind {
		case ahsExtendedCDB:
			if a.ExtendedCDB != nil {
				return AHS{}, errAHSTwice
			}
			if len(body) == 0 || len(body) > maxExtendedCDB {
				return AHS{}, errAHSLength
			}
			a.ExtendedCDB = body
		case ahsBidiLength:
			if a.HasBidi {
				return AHS{}, errAHSTwice
			}
			if len(body) != 4 {
				return AHS{}, errAHSLength
			}
			a.HasBidi, a.BidiReadLength = true, binary.BigEndian.Uint32(body)
		}
		b = b[min((ahsHeaderLen+n+3)&^3, len(b)):]
	}
	return a, nil
}

// AppendExtendedCDB appends the segment that carries the bytes of a CDB after its first 16.
func AppendExtendedCDB(dst, cdb []byte) []byte {
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(cdb)+1))
	dst = append(dst, ahsExtendedCDB, 0)
	dst = append(dst, cdb...)
	for len(dst)%4 != 0 {
		dst = append(dst, 0)
	}
	return dst
}

// AppendBidiLength appends the segment with the read length of a bidirectional command, in bytes.
func AppendBidiLength(dst []byte, n uint32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, 0, 5, ahsBidiLength, 0), n)
}
