package scsi

import (
	"fmt"
	"slices"
)

// AccessMode says which initiators may use a LUN.
type AccessMode string

// The access modes. The empty mode is AccessWriteExclusive.
const (
	// AccessWriteExclusive admits one initiator name at a time. The first one that accesses the
	// medium owns the LUN until its last nexus is gone. Commands of all others end with RESERVATION
	// CONFLICT.
	AccessWriteExclusive AccessMode = "write-exclusive"
	// AccessWriteShared admits every initiator to read and write.
	AccessWriteShared AccessMode = "write-shared"
	// AccessReadShared admits every initiator to read; the LUN is write-protected.
	AccessReadShared AccessMode = "read-shared"
)

// ParseAccessMode reads the name of an access mode. The empty name is AccessWriteExclusive.
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

// SetAccess changes who may use a served LUN and whether it can be written. Commands that were
// validated before go on. A unit attention tells initiators of a changed write protection. On an
// error nothing has changed.
//
// A shared LUN cannot become exclusive: several initiators may be writing, and nothing says which
// one should stay. A LUN that was write-protected from the beginning stays so, because its disk may
// have been opened for reading only.
func (d *Device) SetAccess(lun uint16, mode AccessMode, readOnly bool) error {
	u := d.luns.Load().at(lun)
	if u == nil || !u.begin() {
		return fmt.Errorf("there is no LUN %d", lun)
	}
	defer u.end()
	exclusive, protected := mode == AccessWriteExclusive, readOnly || mode == AccessReadShared
	u.persistent.mu.Lock() // wait for a handover under way
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

// admits reports whether commands of the nexus have no conflict with the unit's owner.
func (d *Device) admits(u *unit, n *Nexus) bool {
	if u.owner.Load() == n.initiator || u.isGuest(n) {
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.releasedLocked(u, n)
}

// MayReset reports whether a nexus may end the commands of others at a logical unit by CLEAR TASK
// SET or LOGICAL UNIT RESET. It may not where its own commands would end with a conflict, for
// example on a machine that a handover has fenced. Reservations do not matter here.
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
	if !u.exclusive.Load() || d.admits(u, n) {
		return true
	}
	d.logConflict(u, n, nil)
	return false
}

// stillAdmitted returns errConflict if the initiator was fenced after its command was validated.
func (t *Task) stillAdmitted() error {
	if t.unit.exclusive.Load() && !t.dev.admits(t.unit, t.Nexus) {
		return errConflict
	}
	return nil
}

func (d *Device) admitsLocked(u *unit, n *Nexus) bool {
	return !u.exclusive.Load() || u.isGuest(n) || d.releasedLocked(u, n)
}

// claim makes the initiator of the nexus the owner of an exclusive unit, unless another one owns
// it.
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

// take is the slow path of claim: the initiator is not yet known as owner or guest.
func (d *Device) take(u *unit, n *Nexus) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u.isGuest(n) {
		return true // it was admitted a moment ago, and a guest must not become the owner
	}
	// A command that outlives its session must not bring the claim back.
	if n.initiator.nexuses == 0 || !d.releasedLocked(u, n) {
		return false
	}
	u.owner.Store(n.initiator)
	return true
}

// releasedLocked reports whether n's initiator, which is not a guest, may use the unit: it is not
// fenced, and no other initiator holds the claim.
func (d *Device) releasedLocked(u *unit, n *Nexus) bool {
	if u.isFenced(n) {
		return false
	}
	owner := u.owner.Load()
	return owner == nil || owner.name == n.initiator.name || !d.heldLocked(u, owner)
}

// heldLocked reports whether the owner of a unit still has its claim. The claim ends with the
// owner's last nexus, but only after the owner's writes have left the disk: a write that is stuck
// there could otherwise surface under the next owner. The claim also lasts while the unit is open
// to a guest, which is about to become the owner. In a live migration the first machine logs out
// before the LUN is handed over, and in a restart both are gone.
func (d *Device) heldLocked(u *unit, owner *initiator) bool {
	return owner.nexuses > 0 || u.handover.Load().Guest != "" || u.ranges.Writing(owner.name)
}

// Holders says who has an exclusive unit.
type Holders struct {
	Owner string // "": nobody
	Guest string // the initiator that may use the unit beside its owner; "": nobody
	// Initiators that a handover has fenced, apart from a readmitted guest. Read-only.
	Fenced []string
}

// Holders tells who has an exclusive unit. Other units have no holders.
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
