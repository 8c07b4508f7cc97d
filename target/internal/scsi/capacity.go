package scsi

import (
	"encoding/binary"
	"math"
)

// physicalShift says that a physical block has 4 KiB, the page of the host.
const physicalShift = 12

// prepareReadCapacity10 is READ CAPACITY(10) (SBC-3 5.15).
func prepareReadCapacity10(t *Task) error {
	last := min(t.unit.blocks()-1, math.MaxUint32)
	t.data = binary.BigEndian.AppendUint32(t.data[:0], uint32(last))
	t.data = binary.BigEndian.AppendUint32(t.data, uint32(t.unit.blockSize()))
	t.reply(uint32(len(t.data)))
	return nil
}

// prepareReadCapacity16 is READ CAPACITY(16) (SBC-3 5.16).
func prepareReadCapacity16(t *Task) error {
	var b [32]byte
	binary.BigEndian.PutUint64(b[0:], t.unit.blocks()-1)
	binary.BigEndian.PutUint32(b[8:], uint32(t.unit.blockSize()))
	b[13] = byte(physicalShift - t.unit.shift) // how many logical blocks it has, as a power of 2
	if t.unit.Discards != nil {
		b[14] = 0x80 | 0x40 // LBPME, LBPRZ
	}
	t.data = append(t.data[:0], b[:]...)
	t.reply(binary.BigEndian.Uint32(t.CDB[10:]))
	return nil
}
