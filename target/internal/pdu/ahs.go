package pdu

import "encoding/binary"

var errAHSTruncated = &FieldError{OpSCSICommand, "additional header segment",
	"runs past TotalAHSLength"}

// CheckAHS checks that additional header segments end where the header says (RFC 7143 11.2.2). What
// they say is ignored: no command has a CDB of more than 16 bytes or moves data in both directions.
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
