package scsi

import "encoding/binary"

// Values of SELECT REPORT.
const (
	selectAddressable = 0x00 // all but well-known logical units
	selectWellKnown   = 0x01
	selectAll         = 0x02
)

// prepareReportLUNs is REPORT LUNS (SPC-4 6.33). It lists LUN 0 only if a disk is there. There are
// no well-known logical units. A nexus that gets the list no longer needs to hear that it has
// changed, at any unit.
func prepareReportLUNs(t *Task) error {
	allocation := binary.BigEndian.Uint32(t.CDB[6:])
	if allocation < 16 {
		return invalidField(6, 7)
	}
	units := []*unit(nil)
	switch t.CDB[2] {
	case selectAddressable, selectAll:
		t.Nexus.listed() // before making the list, so that a change from now on is reported
		units = t.dev.luns.Load().units
	case selectWellKnown:
	default:
		return invalidField(2, 7)
	}
	t.data = binary.BigEndian.AppendUint32(t.data[:0], uint32(8*len(units)))
	t.data = binary.BigEndian.AppendUint32(t.data, 0)
	for _, u := range units {
		t.data = binary.BigEndian.AppendUint64(t.data, EncodeLUN(u.Number))
	}
	t.reply(allocation)
	return nil
}

// listed clears the unit attentions about a changed list of units (SAM-5 5.14.1), and allows
// another asynchronous event about it.
func (n *Nexus) listed() {
	n.toldOfList.Store(false)
	slots := *n.slots.Load()
	for i := range slots {
		if at := slots[i].Load(); at != nil {
			at.clear(attnLUNsChanged)
		}
	}
}
