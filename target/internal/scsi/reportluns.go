package scsi

import "encoding/binary"

// Values of SELECT REPORT.
const (
	selectAddressable = 0x00 // all but well-known logical units
	selectWellKnown   = 0x01
	selectAll         = 0x02
)

// prepareReportLUNs is REPORT LUNS (SPC-4 6.33). LUN 0 is listed only if a disk is there, and there are no
// well-known logical units.
func prepareReportLUNs(t *Task) error {
	allocation := binary.BigEndian.Uint32(t.CDB[6:])
	if allocation < 16 {
		return invalidField(6, 7)
	}
	units := t.dev.units
	switch t.CDB[2] {
	case selectAddressable, selectAll:
	case selectWellKnown:
		units = nil
	default:
		return invalidField(2, 7)
	}
	if t.unit != nil {
		// SAM-5 5.14.1: the news that the list has changed has been delivered.
		t.Nexus.units[t.unit.index].clear(attnLUNsChanged)
	}
	t.data = binary.BigEndian.AppendUint32(t.data[:0], uint32(8*len(units)))
	t.data = binary.BigEndian.AppendUint32(t.data, 0)
	for _, u := range units {
		t.data = binary.BigEndian.AppendUint64(t.data, encodeLUN(u.number))
	}
	t.reply(allocation)
	return nil
}
