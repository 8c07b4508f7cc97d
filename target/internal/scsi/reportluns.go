package scsi

import "encoding/binary"

// Values of SELECT REPORT.
const (
	selectAddressable = 0x00 // all but well-known logical units
	selectWellKnown   = 0x01
	selectAll         = 0x02
)

// prepareReportLUNs is REPORT LUNS (SPC-4 6.33). LUN 0 is listed only if a disk is there, and there
// are no well-known logical units. Whoever has the list needs the news no more that it has changed,
// of whichever unit.
func prepareReportLUNs(t *Task) error {
	allocation := binary.BigEndian.Uint32(t.CDB[6:])
	if allocation < 16 {
		return invalidField(6, 7)
	}
	units := []*unit(nil)
	switch t.CDB[2] {
	case selectAddressable, selectAll:
		t.Nexus.listed() // before the list is made: a change that comes now is told
		units = t.dev.luns.Load().units
	case selectWellKnown:
	default:
		return invalidField(2, 7)
	}
	t.data = binary.BigEndian.AppendUint32(t.data[:0], uint32(8*len(units)))
	t.data = binary.BigEndian.AppendUint32(t.data, 0)
	for _, u := range units {
		t.data = binary.BigEndian.AppendUint64(t.data, EncodeLUN(u.number))
	}
	t.reply(allocation)
	return nil
}

// listed ends the unit attentions that tell that the list of units has changed (SAM-5 5.14.1), and
// what keeps from telling it once more by an asynchronous event.
func (n *Nexus) listed() {
	n.told.Store(false)
	slots := *n.slots.Load()
	for i := range slots {
		if at := slots[i].Load(); at != nil {
			at.clear(attnLUNsChanged)
		}
	}
}
