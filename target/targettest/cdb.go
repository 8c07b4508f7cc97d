package targettest

import "encoding/binary"

// BlockSize is the block length of the commands below in bytes.
const BlockSize = 512

// TestUnitReady is a TEST UNIT READY.
func TestUnitReady(lun uint16) Command { return Command{LUN: lun, CDB: make([]byte, 6)} }

// Inquiry is an INQUIRY for the standard data.
func Inquiry(lun uint16, allocation int) Command {
	return Command{LUN: lun, CDB: []byte{0x12, 0, 0, byte(allocation >> 8), byte(allocation), 0},
		Read: allocation}
}

// ReportLUNs is a REPORT LUNS.
func ReportLUNs(allocation int) Command {
	cdb := make([]byte, 12)
	cdb[0] = 0xa0
	binary.BigEndian.PutUint32(cdb[6:], uint32(allocation))
	return Command{CDB: cdb, Read: allocation}
}

// ReadCapacity10 is a READ CAPACITY(10).
func ReadCapacity10(lun uint16) Command {
	return Command{LUN: lun, CDB: append([]byte{0x25}, make([]byte, 9)...), Read: 8}
}

// Read10 reads blocks.
func Read10(lun uint16, lba uint32, blocks int) Command {
	return Command{LUN: lun, CDB: rw10(0x28, lba, blocks), Read: blocks * BlockSize}
}

// Write10 writes data, a whole number of blocks.
func Write10(lun uint16, lba uint32, data []byte) Command {
	return Command{LUN: lun, CDB: rw10(0x2a, lba, len(data)/BlockSize), Write: data}
}

// SynchronizeCache10 flushes the whole disk.
func SynchronizeCache10(lun uint16) Command { return Command{LUN: lun, CDB: rw10(0x35, 0, 0)} }

func rw10(op byte, lba uint32, blocks int) []byte {
	cdb := make([]byte, 10)
	cdb[0] = op
	binary.BigEndian.PutUint32(cdb[2:], lba)
	binary.BigEndian.PutUint16(cdb[7:], uint16(blocks))
	return cdb
}

// ClearAttention runs TEST UNIT READY until it is GOOD, and returns the sense data of those that
// were not: the unit attentions that were pending.
func (s *Session) ClearAttention(lun uint16) ([]Sense, error) {
	var list []Sense
	for range 16 {
		r, err := s.Do(TestUnitReady(lun))
		if err != nil || r.Good() {
			return list, err
		}
		list = append(list, r.Sense)
		if r.Sense.Key != 6 {
			return list, nil
		}
	}
	return list, nil
}

// CopySegment is a block device to block device segment of an EXTENDED COPY (SPC-4 6.4.6.4).
type CopySegment struct {
	Source, Dest int // indexes of the logical units; 0xffff: the one that gets the command
	Blocks       int
	From, To     uint64 // logical block addresses
}

// CopyList is a parameter list of EXTENDED COPY(LID1) with this list identifier. NAA designators
// name the logical units.
func CopyList(id byte, units [][8]byte, segments ...CopySegment) []byte {
	be := binary.BigEndian
	b := make([]byte, 16, 16+32*len(units)+28*len(segments))
	b[0] = id
	be.PutUint16(b[2:], uint16(32*len(units)))
	be.PutUint32(b[8:], uint32(28*len(segments)))
	for _, naa := range units {
		b = append(b, 0xe4, 0, 0, 0, 0x01, 0x03, 0, byte(len(naa)))
		b = append(append(b, naa[:]...), make([]byte, 12)...)
		b = be.AppendUint32(b, BlockSize)
	}
	for _, s := range segments {
		b = append(b, 0x02, 0, 0, 24)
		b = be.AppendUint16(be.AppendUint16(b, uint16(s.Source)), uint16(s.Dest))
		b = be.AppendUint16(append(b, 0, 0), uint16(s.Blocks))
		b = be.AppendUint64(be.AppendUint64(b, s.From), s.To)
	}
	return b
}

// ExtendedCopy is an EXTENDED COPY(LID1) with a parameter list.
func ExtendedCopy(lun uint16, list []byte) Command {
	cdb := make([]byte, 16)
	cdb[0] = 0x83
	binary.BigEndian.PutUint32(cdb[10:], uint32(len(list)))
	return Command{LUN: lun, CDB: cdb, Write: list}
}

// ReceiveCopyResults is a RECEIVE COPY RESULTS command: service action 0 status, 3 operating
// parameters.
func ReceiveCopyResults(lun uint16, action, id byte, allocation int) Command {
	cdb := make([]byte, 16)
	cdb[0], cdb[1], cdb[2] = 0x84, action, id
	binary.BigEndian.PutUint32(cdb[10:], uint32(allocation))
	return Command{LUN: lun, CDB: cdb, Read: allocation}
}
