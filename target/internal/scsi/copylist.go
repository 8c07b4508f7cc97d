package scsi

import (
	"encoding/binary"
	"math/bits"
)

// The parameter list of EXTENDED COPY(LID1) (SPC-4 6.4.3), big-endian:
//
//	0       LIST IDENTIFIER
//	1       STR (bit 5), LIST ID USAGE (bits 4 and 3), PRIORITY (bits 2 to 0)
//	2..3    length of the CSCD descriptors, bytes
//	8..11   length of the segment descriptors, bytes
//	12..15  length of inline data, bytes
//	16..    CSCD descriptors, segment descriptors, inline data
const (
	copyHeaderLen  = 16
	copyTargetLen  = 32 // an identification CSCD descriptor
	copySegmentLen = 28 // a block device to block device segment descriptor

	copyTargetIdentification = 0xe4
	copySegmentBlocks        = 0x02

	// ownTarget is the CSCD descriptor ID of the logical unit that received the command.
	ownTarget = 0xffff

	maxDesignator = 20 // bytes in a CSCD descriptor
)

// Values of LIST ID USAGE (SPC-4 6.4.3.2).
const (
	listIDHold    = 0
	listIDDiscard = 2 // the same as listIDHold here: no supported segment descriptor holds data
	listIDNone    = 3
)

// copyList is a valid parameter list.
type copyList struct {
	id         byte
	identified bool // RECEIVE COPY RESULTS may name the copy by its id
	targets    []copyTarget
	segments   []copySegment
}

// copyTarget is an identification CSCD descriptor (SPC-4 6.4.5.2).
type copyTarget struct {
	peripheral byte // peripheral device type
	isNAA      bool // this device's logical units may have this designator
	naa        [8]byte
	blockSize  int // bytes, as the initiator assumes
}

// copySegment is a block device to block device segment descriptor (SPC-4 6.4.6.4). Two bits are
// ignored: DC says whose logical blocks are counted, and CAT what happens to a partial block. Both
// units of a segment must have blocks of one length.
type copySegment struct {
	source, dest uint16 // CSCD descriptor IDs
	blocks       uint64
	from, to     uint64 // logical block addresses
}

// parseCopyList parses a parameter list. p has at least a header.
func parseCopyList(p []byte) (copyList, error) {
	be := binary.BigEndian
	targets, segments, inline := uint64(be.Uint16(p[2:])), uint64(be.Uint32(p[8:])),
		uint64(be.Uint32(p[12:]))
	list := copyList{id: p[0], identified: p[1]>>3&3 != listIDNone}
	switch {
	case targets+segments > maxCopyList:
		return list, errParameterLength
	case inline > 0:
		// no supported segment descriptor takes inline data
		return list, copyListError(ascInlineDataLength, 12)
	case copyHeaderLen+targets+segments > uint64(len(p)):
		return list, errParameterLength
	case p[1]&0xc0 != 0:
		return list, invalidParameter(1, bits.Len8(p[1])-1)
	case p[1]>>3&3 != listIDHold && p[1]>>3&3 != listIDDiscard && list.identified:
		return list, invalidParameter(1, 4)
	case !list.identified && list.id != 0:
		return list, invalidParameter(0, 7)
	case targets/copyTargetLen > maxCopyTargets:
		return list, copyListError(ascTooManyTargets, 2)
	}
	end := copyHeaderLen + int(targets)
	for at := copyHeaderLen; at < end; at += copyTargetLen {
		target, err := parseCopyTarget(p[at:end], at)
		if err != nil {
			return list, err
		}
		list.targets = append(list.targets, target)
	}
	at := end
	for end += int(segments); at < end; at += copySegmentLen {
		if len(list.segments) == maxCopySegments {
			return list, copyListError(ascTooManySegments, 8)
		}
		segment, err := parseCopySegment(p[at:end], at)
		if err != nil {
			return list, err
		}
		list.segments = append(list.segments, segment)
	}
	return list, nil
}

// copyListError refuses a parameter list with a specific additional sense code.
func copyListError(code additional, byteOffset int) error {
	return &senseError{key: IllegalRequest, code: code, sks: fieldPointer(0, byteOffset, 7)}
}

// parseCopyTarget reads the CSCD descriptor at the start of p, which is at offset at of the list:
//
//	0       descriptor type
//	1       LU ID TYPE (bits 7 and 6; no meaning in this type), peripheral device type (4 to 0)
//	2..3    relative initiator port identifier: the copy manager chooses the port itself
//	4..7    code set, association and designator type, reserved, designator length
//	8..27   designator
//	28..31  PAD (bit 2 of 28, as CAT), block length in bytes (29 to 31)
func parseCopyTarget(p []byte, at int) (target copyTarget, err error) {
	switch {
	case p[0] != copyTargetIdentification:
		return target, copyListError(ascUnsupportedTarget, at)
	case len(p) < copyTargetLen:
		return target, invalidParameter(2, 7) // the list ends within a descriptor
	case p[5]>>4&3 != ofUnit:
		return target, invalidParameter(at+5, 5)
	case p[7] > maxDesignator:
		return target, invalidParameter(at+7, 7)
	}
	target.peripheral = p[1] & 0x1f
	target.blockSize = int(binary.BigEndian.Uint32(p[28:]) & 0xffffff)
	// Other designators of our units are too long for a CSCD descriptor, so only NAA can match.
	if p[4]&0x0f == codeSetBinary && p[5]&0x0f == designatorNAA && int(p[7]) == len(target.naa) {
		target.isNAA = true
		copy(target.naa[:], p[8:])
	}
	return target, nil
}

// Fields of a segment descriptor, for field pointers.
const (
	segmentSource = 4
	segmentDest   = 6
	segmentBlocks = 10
	segmentFrom   = 12
	segmentTo     = 20
)

// parseCopySegment reads the segment descriptor at the start of p, which is at offset at of the
// list.
func parseCopySegment(p []byte, at int) (s copySegment, err error) {
	const dc, cat = 0x02, 0x01
	be := binary.BigEndian
	switch {
	case p[0] != copySegmentBlocks:
		return s, copyListError(ascUnsupportedSegment, at)
	case len(p) < copySegmentLen:
		return s, invalidParameter(8, 7) // the list ends within a descriptor
	case p[1]&^(dc|cat) != 0:
		return s, invalidParameter(at+1, bits.Len8(p[1]&^(dc|cat))-1)
	case be.Uint16(p[2:]) != copySegmentLen-4:
		return s, invalidParameter(at+2, 7)
	}
	return copySegment{
		source: be.Uint16(p[segmentSource:]), dest: be.Uint16(p[segmentDest:]),
		blocks: uint64(be.Uint16(p[segmentBlocks:])),
		from:   be.Uint64(p[segmentFrom:]), to: be.Uint64(p[segmentTo:]),
	}, nil
}
