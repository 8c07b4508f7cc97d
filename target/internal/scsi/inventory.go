package scsi

import (
	"cmp"
	"encoding/binary"
	"slices"
	"sync/atomic"

	"kubevirt.io/disk/serving"
)

// Logical units come and go while the device works. A command takes no lock for that. It loads the
// inventory once and keeps the unit that it finds there, even if another unit gets the number
// later. All state of a unit is in unit and nexusUnit, so none of it can reach the next unit with
// the same number.

// inventory is the set of logical units of a device. A change replaces it. It never changes once it
// is published.
type inventory struct {
	units []*unit // ascending by number
	byLUN []*unit // by number; nil where there is none
}

func newInventory(units []*unit) *inventory {
	slices.SortFunc(units, func(a, b *unit) int { return cmp.Compare(a.Number, b.Number) })
	inv := &inventory{units: units}
	if len(units) > 0 {
		inv.byLUN = make([]*unit, int(units[len(units)-1].Number)+1)
	}
	for _, u := range units {
		inv.byLUN[u.Number] = u
	}
	return inv
}

// at returns the unit with this number; nil if there is none.
func (inv *inventory) at(number uint16) *unit {
	if int(number) >= len(inv.byLUN) {
		return nil
	}
	return inv.byLUN[number]
}

// Take adds a unit for a disk. It may wait for the disk's store; nothing else waits meanwhile.
// Every nexus gets unit attentions: REPORTED LUNS DATA HAS CHANGED at all units (SPC-4 6.33), and
// POWER ON at the new one. Take returns the nexuses that also need an asynchronous event.
func (d *Device) Take(served *serving.Disk) (map[*Nexus]struct{}, error) {
	u, err := newUnit(served)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.enrolLocked(u)
	for n := range d.nexuses {
		at := n.meetLocked(d, u)
		at.cameLater = true // at is not in use yet
		at.raise(attnPowerOn)
	}
	d.luns.Store(newInventory(append(slices.Clone(d.luns.Load().units), u)))
	return d.inventoryChangedLocked(), nil
}

// enrolLocked gives a unit its slot in the tables of the nexuses.
func (d *Device) enrolLocked(u *unit) {
	d.enrolled++
	u.order = d.enrolled
	if n := len(d.vacated); n > 0 {
		u.slot = d.vacated[n-1]
		d.vacated = d.vacated[:n-1]
		return
	}
	u.slot = d.slots
	d.slots++
}

// Drop removes a unit whose disk is removed. Later commands to it end with LOGICAL UNIT NOT
// SUPPORTED (SPC-4 4.5.1, SAM-5 5.11). So do commands under way when they next use the disk. Every
// nexus gets a unit attention at the remaining units. Drop returns the nexuses that also need an
// asynchronous event, and whether there was such a unit.
func (d *Device) Drop(served *serving.Disk) (tell map[*Nexus]struct{}, taken bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	u := d.unitOf(served)
	if u == nil {
		return nil, false
	}
	d.luns.Store(newInventory(slices.DeleteFunc(slices.Clone(d.luns.Load().units),
		func(o *unit) bool { return o == u })))
	for n := range d.nexuses {
		n.forgetLocked(u)
	}
	d.vacated = append(d.vacated, u.slot)
	return d.inventoryChangedLocked(), true
}

// inventoryChangedLocked raises a unit attention for every nexus at every unit, because the list of
// units has changed. It returns the nexuses that also need an asynchronous event. A nexus that got
// this event gets no other until it asks for the list. So an initiator that ignores these events
// does not get more and more.
func (d *Device) inventoryChangedLocked() map[*Nexus]struct{} {
	d.changes++
	for _, u := range d.luns.Load().units {
		d.raiseLocked(u, attnLUNsChanged, nil)
	}
	tell := make(map[*Nexus]struct{})
	for n := range d.nexuses {
		if !n.toldOfList.Swap(true) {
			tell[n] = struct{}{}
		}
	}
	return tell
}

// Grew tells every nexus that a disk has grown (2A/09, SBC-3 4.7).
func (d *Device) Grew(served *serving.Disk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u := d.unitOf(served); u != nil {
		d.changes++
		u.grownAt = d.changes
		d.raiseLocked(u, attnCapacityChanged, nil)
	}
}

// nexusUnits holds the state of a nexus at each unit, indexed by unit.slot. A new unit reuses the
// slot of a removed one.
type nexusUnits []atomic.Pointer[nexusUnit]

// at returns the state of the nexus at a unit; nil if the unit is removed.
func (n *Nexus) at(u *unit) *nexusUnit {
	if slots := *n.slots.Load(); u.slot < len(slots) {
		if p := slots[u.slot].Load(); p != nil && p.unit == u {
			return p
		}
	}
	return nil
}

// meetLocked makes the state of the nexus at a unit that is about to join the inventory. The caller
// has Device.mu.
func (n *Nexus) meetLocked(d *Device, u *unit) *nexusUnit {
	slots := *n.slots.Load()
	if u.slot >= len(slots) {
		grown := make(nexusUnits, max(d.slots, 2*len(slots)))
		for i := range slots {
			grown[i].Store(slots[i].Load())
		}
		n.slots.Store(&grown)
		slots = grown
	}
	p := &nexusUnit{unit: u}
	if former, ok := d.tenants[u.Number][n.port]; ok && former != u.Identity.NAA {
		p.unprobed.Store(true)
	}
	p.barLocked(n)
	slots[u.slot].Store(p)
	return p
}

// forgetLocked drops the state of the nexus at a removed unit. The caller has Device.mu.
func (n *Nexus) forgetLocked(u *unit) {
	(*n.slots.Load())[u.slot].Store(nil)
	n.copies = slices.DeleteFunc(n.copies, func(op *copyOperation) bool {
		return op.unit == u && op.task == nil
	})
}

// maxTenants bounds for how many initiator ports a LUN remembers which disk they have used.
const maxTenants = 256

// Initiators go by the number of a LUN, even after a unit attention: Linux repeats the command, and
// it reaches the disk that has the number by then. So a port that has used one disk under a number
// gets LOGICAL UNIT NOT SUPPORTED when another disk has the number, until the port has probed the
// new disk. A probe is the standard INQUIRY of 36 bytes with which initiators begin to set up a
// disk. udev's tools ask for more than 36 bytes, each time a disk that is set up is closed, and the
// kernel does not see the answer. In a session that began after the change, any standard INQUIRY
// counts as a probe.

// probeLen is the allocation length of a probe in bytes: every device since SCSI-2 has at least
// that much INQUIRY data.
const probeLen = 36

// probed is called for each standard INQUIRY.
func (t *Task) probed(allocation uint32) {
	if at := t.at; at != nil && at.unprobed.Load() && (allocation == probeLen || !at.cameLater) {
		t.dev.introduce(at, t.Nexus)
	}
}

// rememberTenantLocked notes which disk the port uses under the unit's number.
func (d *Device) rememberTenantLocked(u *unit, n *Nexus) {
	ports := d.tenants[u.Number]
	if ports == nil {
		ports = make(map[InitiatorPort][8]byte)
		d.tenants[u.Number] = ports
	}
	if _, known := ports[n.port]; !known && len(ports) >= maxTenants {
		d.evictTenantLocked(ports)
	}
	ports[n.port] = u.Identity.NAA
}

// evictTenantLocked makes room for another port. Ports without a session go first.
func (d *Device) evictTenantLocked(ports map[InitiatorPort][8]byte) {
	attached := make(map[InitiatorPort]struct{}, len(d.nexuses))
	for n := range d.nexuses {
		attached[n.port] = struct{}{}
	}
	var victim InitiatorPort
	for victim = range ports {
		if _, ok := attached[victim]; !ok {
			break
		}
	}
	delete(ports, victim)
}

// introduce lets a nexus use a unit that has the number of a former unit.
func (d *Device) introduce(p *nexusUnit, n *Nexus) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.tenants[p.unit.Number], n.port)
	p.unprobed.Store(false)
}

// Values of SELECT REPORT.
const (
	selectAddressable = 0x00 // all but well-known logical units
	selectWellKnown   = 0x01
	selectAll         = 0x02
)

// prepareReportLUNs is REPORT LUNS (SPC-4 6.33). It lists LUN 0 only if a disk is there. There are
// no well-known logical units. A nexus that gets the list need not be told of earlier changes any
// more, at any unit.
func prepareReportLUNs(t *Task) error {
	allocation := binary.BigEndian.Uint32(t.CDB[6:])
	if allocation < 16 {
		return invalidField(6, 7)
	}
	units := []*unit(nil)
	switch t.CDB[2] {
	case selectAddressable, selectAll:
		t.Nexus.listed() // before the list is made, so that a change from now on is reported
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

// listed clears the unit attentions about a changed list of units (SAM-5 5.14.1), and allows the
// next asynchronous event about it.
func (n *Nexus) listed() {
	n.toldOfList.Store(false)
	slots := *n.slots.Load()
	for i := range slots {
		if at := slots[i].Load(); at != nil {
			at.clear(attnLUNsChanged)
		}
	}
}

const (
	parameterFormatMask = 0xe0 // PARAMETER DATA FORMAT, byte 1
	formatExtended      = 1

	accessOptimized = 0x00 // asymmetric access state active/optimized
	supportsActive  = 0x01 // AO_SUP: the only state
)

// prepareReportPortGroups is REPORT TARGET PORT GROUPS (SPC-4 6.37). It reports one group with one
// port, which is always active. All portals belong to that port: in RFC 7143 4.4.3 the portal group
// is the target port.
func prepareReportPortGroups(t *Task) error {
	t.data = append(t.data[:0], 0, 0, 0, 0)
	switch t.CDB[1] >> 5 {
	case 0:
	case formatExtended:
		t.data = append(t.data, formatExtended<<4, 0, 0, 0) // implicit transitions take no time
	default:
		return invalidField(1, 7)
	}
	t.data = append(t.data, accessOptimized, supportsActive, 0, PortalGroup, 0, 0, 0, 1)
	t.data = append(t.data, 0, 0, 0, relativePort)
	binary.BigEndian.PutUint32(t.data, uint32(len(t.data)-4))
	t.reply(binary.BigEndian.Uint32(t.CDB[6:]))
	return nil
}
