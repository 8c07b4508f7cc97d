package scsi

import (
	"fmt"
	"slices"
)

// AccessMode says which initiators may use a LUN.
type AccessMode string

// The access modes. The empty mode is AccessWriteExclusive.
const (
	// AccessWriteExclusive admits one initiator name at a time: the first that accesses the medium
	// owns the LUN until its last nexus is gone. The others' commands end with RESERVATION
	// CONFLICT.
	AccessWriteExclusive AccessMode = "write-exclusive"
	// AccessWriteShared admits every initiator to read and write.
	AccessWriteShared AccessMode = "write-shared"
	// AccessReadShared admits every initiator to read; the LUN is write-protected.
	AccessReadShared AccessMode = "read-shared"
)

// ParseAccessMode reads the name of an access mode; the empty one is AccessWriteExclusive.
func ParseAccessMode(s string) (AccessMode, error) {
	switch m := AccessMode(s); m {
	case AccessWriteExclusive, AccessWriteShared, AccessReadShared:
		return m, nil
	case "":
		return AccessWriteExclusive, nil
	}
	return "", fmt.Errorf("access mode %q is unknown; use %s, %s or %s", s, AccessWriteExclusive,
		AccessWriteShared, AccessReadShared)
}

// SetAccess changes who may use a LUN, and whether it can be written, while it is served. Commands
// that were validated before go on; initiators are told of a write protection by a unit attention.
// An error says why it cannot be, and nothing has changed. A LUN that was shared does not become
// exclusive: several initiators may be writing, and of none is it known that it should be kept from
// it. One that was write-protected from the beginning stays so, as its disk may have been opened
// for reading only.
func (d *Device) SetAccess(lun uint16, mode AccessMode, readOnly bool) error {
	u := d.luns.Load().at(lun)
	if u == nil || !u.begin() {
		return fmt.Errorf("there is no LUN %d", lun)
	}
	defer u.end()
	exclusive, protected := mode == AccessWriteExclusive, readOnly || mode == AccessReadShared
	u.persistent.mu.Lock() // a handover that is under way comes to its end
	defer u.persistent.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case exclusive && !u.exclusive.Load():
		return fmt.Errorf("LUN %d becomes %s by a restart only: several initiators may be using it",
			lun, AccessWriteExclusive)
	case !protected && u.sealed:
		return fmt.Errorf("LUN %d can be written after a restart only: its disk was opened for "+
			"reading",
			lun)
	case !exclusive && u.handover.Load().Guest != "":
		return fmt.Errorf("LUN %d is open for a handover: finish or cancel that first", lun)
	}
	u.exclusive.Store(exclusive)
	if u.protected.Swap(protected) != protected {
		d.raiseLocked(u, attnModeChanged, nil)
	}
	return nil
}

// admits reports whether commands of the nexus are free of a conflict with the owner of the unit.
func (d *Device) admits(u *unit, n *Nexus) bool {
	if u.owner.Load() == n.initiator || u.isGuest(n) {
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.releasedLocked(u, n)
}

// MayReset reports whether a nexus may end the commands of others at a logical unit, by a CLEAR
// TASK SET or LOGICAL UNIT RESET: not where they would end with a conflict themselves, as those of
// a machine that a handover has fenced. Reservations do not keep it from that.
func (d *Device) MayReset(lun uint64, n *Nexus) bool {
	u := d.unit(lun)
	return u == nil || d.mayReset(u, n)
}

// MayResetTarget is MayReset for all logical units, which a target reset is for.
func (d *Device) MayResetTarget(n *Nexus) bool {
	units := d.luns.Load().units
	return !slices.ContainsFunc(units, func(u *unit) bool { return !d.mayReset(u, n) })
}

func (d *Device) mayReset(u *unit, n *Nexus) bool {
	if !u.exclusive.Load() || d.admits(u, n) {
		return true
	}
	d.logConflict(u, n, nil)
	return false
}

// stillAdmitted is errConflict where the initiator was fenced off since the command was validated.
func (t *Task) stillAdmitted() error {
	if t.unit.exclusive.Load() && !t.dev.admits(t.unit, t.Nexus) {
		return errConflict
	}
	return nil
}

func (d *Device) admitsLocked(u *unit, n *Nexus) bool {
	return !u.exclusive.Load() || u.isGuest(n) || d.releasedLocked(u, n)
}

// claim makes the initiator of the nexus the owner of an exclusive unit, unless it is taken.
func (d *Device) claim(at *nexusUnit, n *Nexus) bool {
	u := at.unit
	if u.exclusive.Load() && u.owner.Load() != n.initiator && !u.isGuest(n) && !d.take(u, n) {
		return false
	}
	if !at.used.Load() {
		d.firstUse(at, n)
	}
	return true
}

// take is claim where the initiator is not known to have the unit.
func (d *Device) take(u *unit, n *Nexus) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u.isGuest(n) {
		return true // since a moment ago; it must not be the owner as well
	}
	// A command that was under way while its session ended must not bring the claim back.
	if n.initiator.nexuses == 0 || !d.releasedLocked(u, n) {
		return false
	}
	u.owner.Store(n.initiator)
	return true
}

// releasedLocked reports whether n's initiator, who is no guest, may use a unit that another one
// may have claimed.
func (d *Device) releasedLocked(u *unit, n *Nexus) bool {
	if u.isFenced(n) {
		return false
	}
	owner := u.owner.Load()
	return owner == nil || owner.name == n.initiator.name || !d.heldLocked(u, owner)
}

// heldLocked reports whether the owner of a unit still has its claim. That ends with the owner's
// last nexus, but not before its writes have left the disk: one that is stuck there would otherwise
// surface under the next owner. Nor while the unit is open to a guest, who is about to be the next
// owner: in a live migration the first machine logs out before the LUN is handed over, and in a
// restart both are gone.
func (d *Device) heldLocked(u *unit, owner *initiator) bool {
	return owner.nexuses > 0 || u.handover.Load().Guest != "" || u.ranges.Writing(owner.name)
}

// Holders are who has an exclusive unit.
type Holders struct {
	Owner string // "": nobody
	Guest string // the initiator that the unit is open to beside its owner; "": nobody
	// who is kept out since a handover, unless it is the guest again; not to be changed
	Fenced []string
}

// Holders tells who has an exclusive unit; of other units it is nobody.
func (d *Device) Holders(lun uint16) (h Holders) {
	u := d.luns.Load().at(lun)
	if u == nil {
		return Holders{}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if o := u.owner.Load(); o != nil && d.heldLocked(u, o) {
		h.Owner = o.name
	}
	state := u.handover.Load()
	h.Guest, h.Fenced = state.Guest, state.Fenced
	return h
}
