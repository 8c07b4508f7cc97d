package scsi

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
)

// A live migration needs a LUN that only one initiator may use to be open to a second one for a
// while: the machine that takes the guest over logs in and reads while the first one still writes.
// Admit opens it, HandOver makes the second one the owner and fences the first, Withdraw closes it
// again to the second. Who is fenced stays so until the LUN is opened to it again.

// ErrNotLoggedIn is why HandOver leaves a LUN with its owner where the initiator that it is open to
// has no session.
var ErrNotLoggedIn = errors.New("is not logged in")

// Opening is a LUN that is open to an initiator beside its owner.
type Opening struct {
	LUN   uint16
	To    string
	Until time.Time // zero: until HandOver or Withdraw
}

// Admit opens an exclusive LUN to an initiator beside its owner. An error says why it cannot be.
// The device does not end that by itself: until is kept for who does, also after a restart (see
// Openings).
func (d *Device) Admit(lun uint16, initiator string, until time.Time) error {
	u, err := d.exclusiveUnit(lun)
	if err != nil {
		return err
	}
	defer u.end()
	u.persistent.mu.Lock()
	defer u.persistent.mu.Unlock()
	next := *u.handover.Load()
	name := strings.ToLower(initiator)
	if next.Guest != "" && next.Guest != name {
		return fmt.Errorf("LUN %d is open to %s already; finish or cancel that first", lun,
			next.Guest)
	}
	if next.Owner = u.ownerName(); next.Owner == name {
		return fmt.Errorf("LUN %d belongs to %s; name the initiator that is to take it over", lun,
			name)
	}
	next.Guest, next.Until = name, until
	if err := u.saveHandover(&next); err != nil {
		return err
	}
	d.mu.Lock()
	taken := u.ownerName() != next.Owner
	if !taken {
		u.handover.Store(&next)
	}
	d.mu.Unlock()
	if taken {
		return errors.Join(fmt.Errorf("LUN %d was taken by %s meanwhile; try again", lun,
			u.ownerName()), u.saveHandover(u.handover.Load()))
	}
	return nil
}

// HandOver makes the initiator that was admitted the owner of the LUN. When it returns, no command
// of another one can change the medium any more; what they send ends with RESERVATION CONFLICT.
// What they have registered and reserved is gone, and the former owner is fenced, also after a
// restart: its name is returned, or "" where nobody is known to have had the LUN. Nothing changes
// unless the new owner is logged in and the LUN's store keeps that.
func (d *Device) HandOver(lun uint16) (former string, err error) {
	how, err := d.fenceOff(lun, d.heirLocked, func(name, heir string) bool { return name != heir },
		func(u *unit, heir string) { u.owner.Store(d.initiators[heir]) })
	return how.loser, err
}

// Withdraw closes a LUN to the initiator that Admit opened it to, as HandOver does to the owner,
// and leaves it with its owner. It returns the name of the initiator that is fenced now.
func (d *Device) Withdraw(lun uint16) (guest string, err error) {
	how, err := d.fenceOff(lun, (*unit).withdrawal,
		func(name, guest string) bool { return name == guest }, func(*unit, string) {})
	return how.loser, err
}

// Openings are the LUNs that are open, as after a restart.
func (d *Device) Openings() (openings []Opening) {
	for _, u := range d.luns.Load().units {
		if h := u.handover.Load(); h.Guest != "" {
			openings = append(openings, Opening{LUN: u.number, To: h.Guest, Until: h.Until})
		}
	}
	return openings
}

// ending is how the time ends that a unit is open.
type ending struct {
	guest string // whom it was open to
	owner string // whose the unit is now; "": nobody's
	loser string // who is fenced for good; "": nobody
}

// fenceOff ends the time that a LUN is open to a guest: find tells how, or why it cannot be, with
// Device.mu held, and commit follows from it. Initiators that are fenced then lose their
// registrations and reservations, and prevent no removal of the medium: they could not take that
// back any more, and those who may use the LUN would meet it.
func (d *Device) fenceOff(lun uint16, find func(*unit) (ending, error),
	fenced func(name, guest string) bool, commit func(u *unit, guest string)) (ending, error) {
	u, err := d.exclusiveUnit(lun)
	if err != nil {
		return ending{}, err
	}
	defer u.end()
	how, nexuses, err := d.closeTo(u, find, fenced, commit)
	if err == nil {
		d.fence(u, nexuses, nil, func(name string) bool { return fenced(name, how.guest) })
	}
	return how, err
}

func (d *Device) closeTo(u *unit, find func(*unit) (ending, error),
	fenced func(name, guest string) bool,
	commit func(u *unit, guest string)) (how ending, nexuses []*Nexus, err error) {
	r := &u.persistent
	r.mu.Lock()
	defer r.mu.Unlock()
	how, err = d.locked(u, find)
	if err != nil {
		return ending{}, nil, err
	}
	before, next := u.handover.Load(), u.handover.Load().ended(how)
	if err := u.saveHandover(next); err != nil {
		return ending{}, nil, err
	}
	e := r.state.Load().without(func(name string) bool { return fenced(name, how.guest) })
	if err := r.save(u.number, &e.persistentState); err != nil {
		return ending{}, nil, errors.Join(err, u.saveHandover(before))
	}
	// What a MODE SELECT or SANITIZE is saving comes into force before, and what comes later finds
	// the fence.
	u.mode.change.Lock()
	defer u.mode.change.Unlock()
	u.sanitizing.mu.Lock()
	defer u.sanitizing.mu.Unlock()
	_, err = d.locked(u, func(u *unit) (ending, error) {
		switch now, err := find(u); {
		case err != nil:
			return ending{}, err
		case now != how:
			return ending{}, fmt.Errorf("LUN %d was taken by %s meanwhile, and stays open to %s; "+
				"try again", u.number, u.ownerName(), now.guest)
		}
		for n := range d.nexuses {
			if at := n.at(u); at != nil && fenced(n.initiator.name, how.guest) {
				at.prevents = false
				at.refused.Store(false)
				nexuses = append(nexuses, n)
			}
		}
		commit(u, how.guest)
		u.handover.Store(next)
		if n := u.reserved.Load(); n != nil && fenced(n.initiator.name, how.guest) {
			u.reserved.Store(nil)
		}
		d.publishLocked(u, e)
		return how, nil
	})
	if err != nil {
		r.unsaved = true // what is on storage has to be put back
		return ending{}, nil, errors.Join(err, r.save(u.number, r.state.Load()),
			u.saveHandover(before))
	}
	return how, nexuses, nil
}

// locked calls f with Device.mu held.
func (d *Device) locked(u *unit, f func(*unit) (ending, error)) (ending, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return f(u)
}

// withdrawal ends with the guest fenced.
func (u *unit) withdrawal() (ending, error) {
	guest := u.handover.Load().Guest
	if guest == "" {
		return ending{}, fmt.Errorf("LUN %d is open to nobody but its owner", u.number)
	}
	return ending{guest: guest, owner: u.ownerName(), loser: guest}, nil
}

// heirLocked ends with the guest as the owner, if it can be, and the owner fenced.
func (d *Device) heirLocked(u *unit) (ending, error) {
	how, err := u.withdrawal()
	if err != nil {
		return ending{}, fmt.Errorf("%w; open it first", err)
	}
	if heir := d.initiators[how.guest]; heir == nil || heir.nexuses == 0 {
		return ending{}, fmt.Errorf("%s %w, so LUN %d stays with its owner", how.guest,
			ErrNotLoggedIn, u.number)
	}
	return ending{guest: how.guest, owner: how.guest, loser: how.owner}, nil
}

// exclusiveUnit finds a unit that has an owner, and keeps its store until u.end.
func (d *Device) exclusiveUnit(lun uint16) (*unit, error) {
	u := d.luns.Load().at(lun)
	switch {
	case u == nil || !u.begin():
		return nil, fmt.Errorf("there is no LUN %d", lun)
	case !u.exclusive.Load():
		u.end()
		return nil, fmt.Errorf("LUN %d is open to every initiator anyway: its access mode is not "+
			"%s", lun, AccessWriteExclusive)
	}
	return u, nil
}

// ownerName is who owns the unit, or did last.
func (u *unit) ownerName() string {
	if owner := u.owner.Load(); owner != nil {
		return owner.name
	}
	return ""
}

// isGuest reports whether the unit is open to the nexus' initiator beside its owner.
func (u *unit) isGuest(n *Nexus) bool { return u.handover.Load().Guest == n.initiator.name }

// isFenced reports whether the nexus' initiator is kept out since a handover. The owner never is.
func (u *unit) isFenced(n *Nexus) bool {
	return slices.Contains(u.handover.Load().Fenced, n.initiator.name)
}

// logFenced tells whoever wonders why a guest meets reservation conflicts, once for each session of
// a fenced initiator and each fence.
func (d *Device) logFenced(u *unit, n *Nexus) {
	if !u.exclusive.Load() || !u.isFenced(n) || u.isGuest(n) {
		return
	}
	if at := n.at(u); at == nil || at.refused.Swap(true) {
		return
	}
	name := n.initiator.name
	d.log.Warn("refusing an initiator that is fenced since a handover: its commands end with "+
		"RESERVATION CONFLICT",
		zap.Uint16("lun", u.number), zap.String("initiator", name),
		zap.String("owner", u.ownerName()),
		zap.String("try", fmt.Sprintf("handover --lun %d --to %s, if the guest is to run there "+
			"and runs nowhere else", u.number, name)))
}
