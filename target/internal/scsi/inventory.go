package scsi

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Logical units come and go while the device works. A command takes no lock for that. It loads the
// inventory once and keeps the unit that it finds there, even if the number gets another unit
// later. All state of a unit is in unit and nexusUnit, so that none of it can reach the next unit
// with the same number.

// inventory holds the logical units of a device. A change replaces it; it never changes once it is
// published.
type inventory struct {
	units []*unit // ascending by number
	byLUN []*unit // by number; nil where there is none
}

func newInventory(units []*unit) *inventory {
	slices.SortFunc(units, func(a, b *unit) int { return cmp.Compare(a.number, b.number) })
	inv := &inventory{units: units}
	if len(units) > 0 {
		inv.byLUN = make([]*unit, int(units[len(units)-1].number)+1)
	}
	for _, u := range units {
		inv.byLUN[u.number] = u
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

// removedUse is added to the use count of a removed unit, which makes the count negative.
const removedUse = math.MinInt64

// uses counts current users of a unit's disk and store, so that both are released when nothing uses
// them.
type uses struct {
	n    atomic.Int64  // negative once the unit is removed
	idle chan struct{} // closed when the unit is removed and nothing uses it
	once sync.Once
}

// begin keeps disk and store until end. It refuses if the unit is removed.
func (s *uses) begin() bool {
	if s.n.Add(1) > 0 {
		return true
	}
	s.end()
	return false
}

func (s *uses) end() {
	if s.n.Add(-1) == removedUse {
		s.once.Do(func() { close(s.idle) })
	}
}

// remove lets no new use begin.
func (s *uses) remove() {
	if s.n.Add(removedUse) == removedUse {
		s.once.Do(func() { close(s.idle) })
	}
}

func (s *uses) removed() bool { return s.n.Load() < 0 }

// leavingUnit is a removed unit whose disk may still be in use.
type leavingUnit struct {
	number uint16
	naa    [8]byte
	idle   chan struct{}
}

// Add puts a disk into the inventory. It may wait for the disk's store; nothing else waits
// meanwhile. Every nexus gets unit attentions: REPORTED LUNS DATA HAS CHANGED at all units (SPC-4
// 6.33), and POWER ON at the new one. Add returns the nexuses that also need an asynchronous event.
func (d *Device) Add(l LUN) (map[*Nexus]struct{}, error) {
	if err := d.beginAdd(&l); err != nil { // before anything is done to the disk
		return nil, err
	}
	u, err := newUnit(l)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.adding, l.Identity.NAA)
	if err != nil {
		return nil, fmt.Errorf("LUN %d: %w", l.Number, err)
	}
	if err := d.vacantLocked(&l); err != nil { // another one may have been faster
		return nil, err
	}
	d.enrolLocked(u)
	for n := range d.nexuses {
		at := n.meetLocked(d, u)
		at.sudden = true // nobody has it yet
		at.raise(attnPowerOn)
	}
	d.luns.Store(newInventory(append(slices.Clone(d.luns.Load().units), u)))
	return d.inventoryChangedLocked(), nil
}

// beginAdd refuses a LUN that cannot be added, and keeps its disk from being added a second time
// meanwhile: newUnit may put back what an interrupted WRITE ATOMIC has replaced, and a second one
// would do so when the disk is in use already.
func (d *Device) beginAdd(l *LUN) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.vacantLocked(l); err != nil {
		return err
	}
	if other, ok := d.adding[l.Identity.NAA]; ok {
		return sameDiskError(l, other)
	}
	d.adding[l.Identity.NAA] = l.Number
	return nil
}

func sameDiskError(l *LUN, other uint16) error {
	return fmt.Errorf("LUN %d has the same identifier as LUN %d, %x: serve each disk once",
		l.Number, other, l.Identity.NAA)
}

// vacantLocked refuses a LUN number that is taken and a disk that is already served: initiators
// would take the two LUNs for paths to one disk.
func (d *Device) vacantLocked(l *LUN) error {
	inv := d.luns.Load()
	if inv.at(l.Number) != nil {
		return takenError(l.Number)
	}
	for _, u := range inv.units {
		if u.identity.NAA == l.Identity.NAA {
			return sameDiskError(l, u.number)
		}
	}
	d.pruneLocked()
	for _, old := range d.leaving {
		if old.naa == l.Identity.NAA {
			return fmt.Errorf("LUN %d: the disk is still used by commands to LUN %d, which was "+
				"removed; wait until it is released", l.Number, old.number)
		}
	}
	return nil
}

func takenError(number uint16) error {
	return fmt.Errorf("LUN %d is given to two disks; give each a number of its own", number)
}

// pruneLocked forgets removed units whose disks are released.
func (d *Device) pruneLocked() {
	d.leaving = slices.DeleteFunc(d.leaving, func(u leavingUnit) bool {
		select {
		case <-u.idle:
			return true
		default:
			return false
		}
	})
}

// enrolLocked gives a unit its slot in the tables of the nexuses.
func (d *Device) enrolLocked(u *unit) {
	d.enrolled++
	u.order = d.enrolled
	u.ctx, u.cancel = context.WithCancel(d.background.ctx)
	if n := len(d.vacated); n > 0 {
		u.slot = d.vacated[n-1]
		d.vacated = d.vacated[:n-1]
		return
	}
	u.slot = d.slots
	d.slots++
}

// Removal is the rest of the work after Remove.
type Removal struct {
	Released <-chan struct{}     // closed when nothing uses the disk or its store any more
	Tell     map[*Nexus]struct{} // nexuses that also need an asynchronous event
	Host     any                 // LUN.Host
}

// Remove takes a unit out of the inventory. Later commands to it end with LOGICAL UNIT NOT
// SUPPORTED (SPC-4 4.5.1, SAM-5 5.11). So do commands under way when they next use the disk. Every
// nexus gets a unit attention at the remaining units.
func (d *Device) Remove(number uint16) (*Removal, error) {
	return d.remove(number, func(*unit) error { return nil })
}

// InUseError says that a LUN was not removed because initiators use it.
type InUseError struct {
	LUN        uint16
	Initiators []string // their names, in order
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("LUN %d is used by %s", e.LUN, strings.Join(e.Initiators, ", "))
}

// RemoveUnused is Remove that fails with an *InUseError if a nexus that is there has accessed the
// medium, or if there is a persistent reservation: its holder bars others from the medium and keeps
// that right while it has no session (SPC-4 5.13.1). A registration alone bars nobody. A command
// that accesses the medium notes its nexus with Device.mu held, before it uses the disk, and only
// if the unit is still there (see firstUse). So of a first command and RemoveUnused at the same
// time, one wins: the command finds no unit, or the unit stays.
func (d *Device) RemoveUnused(number uint16) (*Removal, error) {
	return d.remove(number, func(u *unit) error {
		users := make(map[string]struct{})
		for n := range d.nexuses {
			if at := n.at(u); at != nil && at.used.Load() {
				users[n.initiator.name] = struct{}{}
			}
		}
		for _, name := range u.persistent.state.Load().holders() {
			users[name] = struct{}{}
		}
		if len(users) == 0 {
			return nil
		}
		return &InUseError{LUN: number, Initiators: slices.Sorted(maps.Keys(users))}
	})
}

// remove removes a unit unless may, which is called with Device.mu held, returns an error.
func (d *Device) remove(number uint16, may func(*unit) error) (*Removal, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	inv := d.luns.Load()
	u := inv.at(number)
	if u == nil {
		return nil, fmt.Errorf("there is no LUN %d", number)
	}
	if err := may(u); err != nil {
		return nil, err
	}
	left := slices.DeleteFunc(slices.Clone(inv.units), func(o *unit) bool { return o == u })
	d.luns.Store(newInventory(left))
	for n := range d.nexuses {
		n.forgetLocked(u)
	}
	d.vacated = append(d.vacated, u.slot)
	u.remove()
	u.cancel()
	d.pruneLocked()
	d.leaving = append(d.leaving, leavingUnit{u.number, u.identity.NAA, u.idle})
	return &Removal{Released: u.idle, Tell: d.inventoryChangedLocked(), Host: u.host}, nil
}

// inventoryChangedLocked raises a unit attention for every nexus at every unit, because the list of
// units has changed. It returns the nexuses that also need an asynchronous event. A nexus that got
// this event gets no other one until it asks for the list: an initiator that ignores these events
// must not get any number of them.
func (d *Device) inventoryChangedLocked() map[*Nexus]struct{} {
	d.changes++
	for _, u := range d.luns.Load().units {
		d.raiseLocked(u, attnLUNsChanged, nil)
	}
	tell := make(map[*Nexus]struct{})
	for n := range d.nexuses {
		if !n.told.Swap(true) {
			tell[n] = struct{}{}
		}
	}
	return tell
}

// Resize adopts the current size of a disk, which can only have grown, and tells every nexus
// (2A/09, SBC-3 4.7).
func (d *Device) Resize(number uint16) error {
	u := d.luns.Load().at(number)
	if u == nil || !u.begin() {
		return fmt.Errorf("there is no LUN %d", number)
	}
	defer u.end()
	u.resizing.Lock()
	defer u.resizing.Unlock()
	size, before := u.disk.Size(), u.blocks.Load()
	switch blocks := uint64(size) >> blockShift; {
	case size%BlockSize != 0:
		return fmt.Errorf("LUN %d: disk size %d is not a multiple of %d", number, size, BlockSize)
	case size < 0 || blocks < before:
		return fmt.Errorf("LUN %d: the disk has become smaller, from %d to %d bytes, and a LUN "+
			"can only grow: remove it, and add it again", number, before<<blockShift, size)
	case blocks == before:
		return nil
	default:
		u.blocks.Store(blocks)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.changes++
	u.grownAt = d.changes
	d.raiseLocked(u, attnCapacityChanged, nil)
	return nil
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

// meetLocked creates the state of the nexus at a unit that is about to join the inventory. The
// caller has Device.mu.
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
	if former, ok := d.tenants[u.number][n.port]; ok && former != u.identity.NAA {
		p.stranger.Store(true)
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

// maxTenants bounds for how many initiator ports a LUN remembers the disk they have used.
const maxTenants = 256

// Initiators go by the number of a LUN, even after a unit attention: Linux repeats the command that
// met it, to whatever disk has that number by then. So a port that has used one disk under a number
// gets LOGICAL UNIT NOT SUPPORTED when another disk has the number, until the port has probed the
// new disk. A probe is the standard INQUIRY of 36 bytes with which initiators begin to set up a
// disk. udev's tools ask for more than 36 bytes. They do so each time somebody closes a disk that
// is set up, and the kernel learns nothing from it. In a session that began after the change, any
// standard INQUIRY counts as a probe.

// probeLen is the allocation length of a probe in bytes: every device since SCSI-2 has that much
// INQUIRY data.
const probeLen = 36

// probed is called for each standard INQUIRY.
func (t *Task) probed(allocation uint32) {
	if at := t.at; at != nil && at.stranger.Load() && (allocation == probeLen || !at.sudden) {
		t.dev.introduce(at, t.Nexus)
	}
}

// rememberTenantLocked notes which disk the port uses under the unit's number.
func (d *Device) rememberTenantLocked(u *unit, n *Nexus) {
	ports := d.tenants[u.number]
	if ports == nil {
		ports = make(map[InitiatorPort][8]byte)
		d.tenants[u.number] = ports
	}
	if _, known := ports[n.port]; !known && len(ports) >= maxTenants {
		d.evictTenantLocked(ports)
	}
	ports[n.port] = u.identity.NAA
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

// introduce lets a nexus use a unit that replaced another one under the same number.
func (d *Device) introduce(p *nexusUnit, n *Nexus) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.tenants[p.unit.number], n.port)
	p.stranger.Store(false)
}
