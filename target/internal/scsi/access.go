package scsi

import (
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
)

// Package serving decides who owns a unit. Commands of others end with RESERVATION CONFLICT.

// MayReset reports whether a nexus may end the commands of others at a logical unit by CLEAR TASK
// SET or LOGICAL UNIT RESET. It may not if the unit's owner bars its own commands, for example
// after a handover has fenced its machine. Reservations do not matter here.
func (d *Device) MayReset(lun uint64, n *Nexus) bool {
	u := d.unit(lun)
	return u == nil || d.mayReset(u, n)
}

// MayResetTarget is MayReset for a target reset, which reaches all logical units.
func (d *Device) MayResetTarget(n *Nexus) bool {
	units := d.luns.Load().units
	return !slices.ContainsFunc(units, func(u *unit) bool { return !d.mayReset(u, n) })
}

func (d *Device) mayReset(u *unit, n *Nexus) bool {
	if n.Admitted(u.served) {
		return true
	}
	d.logConflict(u, n, nil)
	return false
}

// stillAdmitted returns errConflict if the initiator was fenced after its command was validated.
func (t *Task) stillAdmitted() error {
	if !t.Nexus.Admitted(t.unit.served) {
		return errConflict
	}
	return nil
}

// claim makes the initiator of the nexus the owner of an exclusive unit, unless another one owns
// it.
func (d *Device) claim(at *nexusUnit, n *Nexus) bool {
	if !n.Claim(at.unit.served) {
		return false
	}
	if !at.used.Load() {
		d.firstUse(at, n)
	}
	return true
}

// firstUse notes that a nexus uses the medium of a unit.
func (d *Device) firstUse(at *nexusUnit, n *Nexus) {
	if n.FirstUse(at.unit.served) != nil {
		return // the unit is removed, so the command will fail
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if n.at(at.unit) == at && !at.used.Swap(true) {
		d.rememberTenantLocked(at.unit, n)
	}
}

// Protected tells every nexus that the write protection of a unit has changed.
func (d *Device) Protected(served *serving.Disk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u := d.unitOf(served); u != nil {
		d.raiseLocked(u, attnModeChanged, nil)
	}
}

// Both bar clients of other protocols. During RESERVE(6), nobody can clear anything.
var (
	errReserved = errors.New("an iSCSI initiator has reserved the disk: have it release the " +
		"disk, or log out")
	errPersistent = errors.New("an iSCSI initiator has reserved the disk: have it release the " +
		"disk, or clear the reservation over iSCSI, by sg_persist --clear")
)

// Bars implements serving.Front. A client of another protocol cannot register, so a reservation
// bars it like an initiator that is not registered (SPC-4 5.13.1). Nor may it write data that the
// next start would undo: see settleAtomic.
func (d *Device) Bars(served *serving.Disk, write bool) error {
	u := d.unitOf(served)
	if u == nil {
		return nil
	}
	right := reservationTypes[u.persistent.state.Load().kind].right
	switch {
	case u.reserved.Load() != nil:
		return errReserved
	case right == duringExclusiveAccess, right == duringWriteExclusive && write:
		return errPersistent
	case write:
		return u.settleAtomic()
	}
	return nil
}

// ReservationHolders returns the names of initiators that hold a persistent reservation. A name may
// be repeated. A holder bars others from the medium, also while it has no session (SPC-4 5.13.1). A
// registration alone bars nobody.
func (d *Device) ReservationHolders(served *serving.Disk) []string {
	if u := d.unitOf(served); u != nil {
		return u.persistent.state.Load().holders()
	}
	return nil
}

// fencing is a fence of initiators at a unit. It holds back changes of the unit's reservations
// until it is committed or undone.
type fencing struct {
	d       *Device
	unit    *unit
	fenced  func(name string) bool
	edit    *persistentEdit
	nexuses []*Nexus // all nexuses at the time when the fence took effect
}

// Fence implements serving.Front. Fenced initiators lose their registrations and reservations.
func (d *Device) Fence(served *serving.Disk, fenced func(name string) bool) (serving.Fencing,
	error) {
	u := d.unitOf(served)
	if u == nil {
		return nil, fmt.Errorf("there is no LUN %d", served.Number)
	}
	r := &u.persistent
	r.mu.Lock()
	e := r.state.Load().withoutFenced(fenced)
	if err := r.save(u.Number, &e.persistentState); err != nil {
		r.mu.Unlock()
		return nil, err
	}
	return &fencing{d: d, unit: u, fenced: fenced, edit: e}, nil
}

func (f *fencing) release() {
	f.unit.persistent.mu.Unlock()
}

// Commit implements serving.Fencing.
func (f *fencing) Commit() {
	defer f.release()
	d, u := f.d, f.unit
	d.mu.Lock()
	defer d.mu.Unlock()
	for n := range d.nexuses {
		if at := n.at(u); at != nil && f.fenced(n.Name()) {
			at.refused.Store(false)
			f.nexuses = append(f.nexuses, n)
		}
	}
	if n := u.reserved.Load(); n != nil && f.fenced(n.Name()) {
		u.reserved.Store(nil)
	}
	d.publishLocked(u, f.edit)
}

// Finish implements serving.Fencing.
func (f *fencing) Finish() { f.d.abort(f.unit, f.nexuses, nil) }

// Undo implements serving.Fencing. Storage has the new state, so the old one is saved again.
func (f *fencing) Undo() error {
	defer f.release()
	r := &f.unit.persistent
	r.unsaved = true
	return r.save(f.unit.Number, r.state.Load())
}

// logFenced logs why a guest gets reservation conflicts, once for each session of a fenced
// initiator and each fence.
func (d *Device) logFenced(u *unit, n *Nexus) {
	if !n.Fenced(u.served) {
		return
	}
	if at := n.at(u); at == nil || at.refused.Swap(true) {
		return
	}
	name := n.Name()
	d.log.Warn("refusing an initiator that is fenced since a handover: its commands end with "+
		"RESERVATION CONFLICT",
		zap.Uint16("lun", u.Number), zap.String("initiator", name),
		zap.String("owner", u.Owner()),
		zap.String("try", fmt.Sprintf("handover --lun %d --to %s, if the guest is to run there "+
			"and runs nowhere else", u.Number, name)))
}
