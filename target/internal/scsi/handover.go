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
// the medium any more; what they send ends with RESERVATION CONFLICT. What they have registered and reserved is gone: they could
// not release it any more, and the new owner would meet it. Nothing changes unless the new owner is logged in.
func (d *Device) HandOver(lun uint16) error {
	u, err := d.exclusiveUnit(lun)
	if err != nil {
		return err
	}
	heir, fenced, err := d.changeOwner(u)
	if err == nil {
		d.fence(u, fenced, nil, func(name string) bool { return name != heir })
	}
	return err
}

func (d *Device) changeOwner(u *unit) (name string, fenced []*Nexus, err error) {
	r := &u.persistent
	r.mu.Lock()
	defer r.mu.Unlock()
	if name, err = d.heir(u); err != nil {
		return "", nil, err
	}
	e := r.state.Load().inherit(name)
	if err := r.save(u.number, &e.persistentState); err != nil {
		return "", nil, err
	}
	if fenced, err = d.inherit(u, name, e); err != nil {
		r.unsaved = true // what is on storage has to be put back
		return "", nil, errors.Join(err, r.save(u.number, r.state.Load()))
	}
	return name, fenced, nil
}

// inherit makes the initiator of this name the owner, unless it has gone meanwhile, and returns the nexuses of all others.
func (d *Device) inherit(u *unit, name string, e *persistentEdit) (fenced []*Nexus, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	heir, err := d.heirLocked(u)
	switch {
	case err != nil:
		return nil, err
	case heir.name != name:
		return nil, fmt.Errorf("LUN %d was opened to another initiator meanwhile, and stays with its owner", u.number)
	}
	for n := range d.nexuses {
		if n.initiator != heir {
			fenced = append(fenced, n)
		}
	}
	u.owner.Store(heir)
	u.guest.Store(nil)
	if n := u.reserved.Load(); n != nil && n.initiator != heir {
		u.reserved.Store(nil)
	}
	d.publishLocked(u, e)
	return fenced, nil
}

// heir is the name of the initiator that was admitted, if it can take the unit over.
func (d *Device) heir(u *unit) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	heir, err := d.heirLocked(u)
	if err != nil {
		return "", err
	}
	return heir.name, nil
}

func (d *Device) heirLocked(u *unit) (*initiator, error) {
	guest := u.guest.Load()
	if guest == nil {
		return nil, fmt.Errorf("LUN %d is open to nobody but its owner; open it first", u.number)
	}
	heir := d.initiators[*guest]
	if heir == nil || heir.nexuses == 0 {
		return nil, fmt.Errorf("%s is not logged in, so LUN %d stays with its owner", *guest, u.number)
	}
	return heir, nil
}

// Withdraw closes a LUN to the initiator that Admit opened it to, and leaves it with its owner.
func (d *Device) Withdraw(lun uint16) error {
	u, err := d.exclusiveUnit(lun)
	if err != nil {
		return err
	}
	d.mu.Lock()
	guest := u.guest.Swap(nil)
	var fenced []*Nexus
	for n := range d.nexuses {
		if guest != nil && n.initiator.name == *guest && u.owner.Load() != n.initiator {
			fenced = append(fenced, n)
		}
	}
	d.mu.Unlock()
	if guest == nil {
		return fmt.Errorf("LUN %d is open to nobody but its owner", lun)
	}
	d.fence(u, fenced, nil, func(name string) bool { return name == *guest })
	return nil
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
