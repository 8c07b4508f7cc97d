package scsi

import "encoding/binary"

// The bits of READ DEFECT DATA that its answer repeats: the requested lists and their format (SBC-3
// 5.17).
const defectListBits = 0x1f

// prepareDefectData10 is READ DEFECT DATA(10) (SBC-3 5.17). The lists are empty, because storage
// hides its defects from us.
func prepareDefectData10(t *Task) error {
	t.data = append(t.data[:0], 0, t.CDB[2]&defectListBits, 0, 0)
	t.reply(uint32(binary.BigEndian.Uint16(t.CDB[7:])))
	return nil
}

// prepareDefectData12 is READ DEFECT DATA(12) (SBC-3 5.18).
func prepareDefectData12(t *Task) error {
	t.data = append(t.data[:0], 0, t.CDB[1]&defectListBits, 0, 0, 0, 0, 0, 0)
	t.reply(binary.BigEndian.Uint32(t.CDB[6:]))
	return nil
}
