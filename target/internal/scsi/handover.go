package scsi

import (
	"errors"
	"fmt"
	"strings"
)

// A live migration needs a LUN that only one initiator may use to be open to a second one for a while: the machine that
// takes the guest over logs in and reads while the first one still writes. Admit opens it, HandOver makes the second one
// the owner and fences the first, Withdraw closes it again to the second.

// Admit opens an exclusive LUN to an initiator beside its owner. An error says why it cannot be.
func (d *Device) Admit(lun uint16, initiator string) error {
	u, err := d.exclusiveUnit(lun)
	if err != nil {
		return err
	}
	name := strings.ToLower(initiator)
	d.mu.Lock()
	defer d.mu.Unlock()
	if guest := u.guest.Load(); guest != nil && *guest != name {
		return fmt.Errorf("LUN %d is open to %s already; finish or cancel that first", lun, *guest)
	}
	if owner := u.owner.Load(); owner != nil && owner.name == name {
		return fmt.Errorf("LUN %d belongs to %s; name the initiator that is to take it over", lun, name)
	}
	u.guest.Store(&name)
	return nil
}

// HandOver makes the initiator that was admitted the owner of the LUN. When it returns, no command of another one can change
// the medium any more; what they send ends with RESERVATION CONFLICT. What they have registered and reserved is gone. Nothing
// changes unless the new owner is logged in.
func (d *Device) HandOver(lun uint16) error {
	return d.fenceOff(lun, d.heirLocked, func(name, heir string) bool { return name != heir },
		func(u *unit, heir string) { u.owner.Store(d.initiators[heir]) })
}

// Withdraw closes a LUN to the initiator that Admit opened it to, as HandOver does to all others, and leaves it with its owner.
func (d *Device) Withdraw(lun uint16) error {
	return d.fenceOff(lun, (*unit).guestName, func(name, guest string) bool { return name == guest }, func(*unit, string) {})
}

// fenceOff ends the time that a LUN is open to a guest: find tells who that is, or why it cannot be, with Device.mu held, and commit
// follows from it. Initiators that are fenced then lose their registrations and reservations, and prevent no removal of the medium: they
// could not take that back any more, and those who may use the LUN would meet it.
func (d *Device) fenceOff(lun uint16, find func(*unit) (string, error), fenced func(name, guest string) bool, commit func(u *unit, guest string)) error {
	u, err := d.exclusiveUnit(lun)
	if err != nil {
		return err
	}
	guest, nexuses, err := d.closeTo(u, find, fenced, commit)
	if err == nil {
		d.fence(u, nexuses, nil, func(name string) bool { return fenced(name, guest) })
	}
	return err
}

func (d *Device) closeTo(u *unit, find func(*unit) (string, error), fenced func(name, guest string) bool,
	commit func(u *unit, guest string)) (guest string, nexuses []*Nexus, err error) {
	r := &u.persistent
	r.mu.Lock()
	defer r.mu.Unlock()
	if guest, err = d.locked(u, find); err != nil {
		return "", nil, err
	}
	e := r.state.Load().without(func(name string) bool { return fenced(name, guest) })
	if err := r.save(u.number, &e.persistentState); err != nil {
		return "", nil, err
	}
	_, err = d.locked(u, func(u *unit) (string, error) {
		switch now, err := find(u); {
		case err != nil:
			return "", err
		case now != guest:
			return "", fmt.Errorf("LUN %d was opened to another initiator meanwhile, and stays with its owner", u.number)
		}
		for n := range d.nexuses {
			if fenced(n.initiator.name, guest) {
				n.units[u.index].prevents = false
				nexuses = append(nexuses, n)
			}
		}
		commit(u, guest)
		u.guest.Store(nil)
		if n := u.reserved.Load(); n != nil && fenced(n.initiator.name, guest) {
			u.reserved.Store(nil)
		}
		d.publishLocked(u, e)
		return guest, nil
	})
	if err != nil {
		r.unsaved = true // what is on storage has to be put back
		return "", nil, errors.Join(err, r.save(u.number, r.state.Load()))
	}
	return guest, nexuses, nil
}

// locked calls f with Device.mu held.
func (d *Device) locked(u *unit, f func(*unit) (string, error)) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return f(u)
}

// guestName is the initiator that the unit is open to beside its owner.
func (u *unit) guestName() (string, error) {
	guest := u.guest.Load()
	if guest == nil {
		return "", fmt.Errorf("LUN %d is open to nobody but its owner", u.number)
	}
	return *guest, nil
}

// heirLocked is the guest, if it can take the unit over.
func (d *Device) heirLocked(u *unit) (string, error) {
	guest, err := u.guestName()
	if err != nil {
		return "", fmt.Errorf("%w; open it first", err)
	}
	if heir := d.initiators[guest]; heir == nil || heir.nexuses == 0 {
		return "", fmt.Errorf("%s is not logged in, so LUN %d stays with its owner", guest, u.number)
	}
	return guest, nil
}

func (d *Device) exclusiveUnit(lun uint16) (*unit, error) {
	u := d.unitByNumber(lun)
	switch {
	case u == nil:
		return nil, fmt.Errorf("there is no LUN %d", lun)
	case !u.exclusive:
		return nil, fmt.Errorf("LUN %d is open to every initiator anyway: its access mode is not %s", lun, AccessWriteExclusive)
	}
	return u, nil
}

// isGuest reports whether the unit is open to the nexus' initiator beside its owner.
func (u *unit) isGuest(n *Nexus) bool {
	guest := u.guest.Load()
	return guest != nil && *guest == n.initiator.name
}
