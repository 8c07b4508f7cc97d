package pdu

import (
	"encoding/binary"
	"errors"
)

// The types of additional header segments (RFC 7143 11.2.2.1).
const (
	ahsExtendedCDB = 1
	ahsBidiLength  = 2

	ahsHeaderLen = 3 // AHSLength and AHSType
)

// AHS is what the additional header segments of a command say.
type AHS struct {
	ExtendedCDB    []byte // the CDB's bytes after the first 16; shares the parsed memory
	HasBidi        bool
	BidiReadLength uint32 // bytes
}

var (
	errAHSTruncated = errors.New("an additional header segment runs past its room")
	errAHSTwice     = errors.New("an additional header segment comes twice")
	errAHSLength    = errors.New("an additional header segment has a length that its type does not allow")
)

// ParseAHS reads the additional header segments of a SCSI Command (RFC 7143 11.2.2). Types that it does not
// know are skipped.
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
		n, kind := int(binary.BigEndian.Uint16(b)), b[2]
		if n == 0 || ahsHeaderLen+n > len(b) {
			return AHS{}, errAHSTruncated
		}
		body := b[ahsHeaderLen+1 : ahsHeaderLen+n]
		switch kind {
		case ahsExtendedCDB:
			if a.ExtendedCDB != nil {
				return AHS{}, errAHSTwice
			}
			if len(body) == 0 {
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
