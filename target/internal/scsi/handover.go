package scsi

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
)

// During a live migration two initiators use an exclusive LUN for a while: the machine that takes
// the guest over logs in and reads while the first one still writes. Admit opens the LUN to the
// second one. HandOver makes the second one the owner and fences the first. Withdraw closes the LUN
// to the second one again. A fenced initiator stays fenced until the LUN is opened to it again.

// ErrNotLoggedIn is the error of HandOver if the initiator that should become the owner has no
// session. The LUN then stays with its owner.
var ErrNotLoggedIn = errors.New("is not logged in")

// Opening is a LUN that a second initiator may use beside its owner.
type Opening struct {
	LUN   uint16
	To    string
	Until time.Time // zero: until HandOver or Withdraw
}

// Admit opens an exclusive LUN to an initiator beside its owner. The error says why that is
// impossible. Admit does not close the LUN again by itself: it only keeps until, also over a
// restart, for the caller that does (see Openings).
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

// HandOver makes the admitted initiator the owner of the LUN. When it returns, no command of
// another initiator can change the medium any more, and their commands end with RESERVATION
// CONFLICT. Their registrations and reservations are gone. The former owner is fenced, also after a
// restart. HandOver returns its name, or "" if the LUN had no known owner. Nothing changes unless
// the new owner is logged in and the LUN's store has saved the change.
func (d *Device) HandOver(lun uint16) (former string, err error) {
	how, err := d.fenceOff(lun, d.heirLocked, func(name, heir string) bool { return name != heir },
		func(u *unit, heir string) { u.owner.Store(d.initiators[heir]) })
	return how.loser, err
}

// Withdraw closes a LUN to the initiator that Admit opened it to, fences that initiator as HandOver
// does with the owner, and leaves the LUN with its owner. It returns the name of the fenced
// initiator.
func (d *Device) Withdraw(lun uint16) (guest string, err error) {
	how, err := d.fenceOff(lun, (*unit).withdrawal,
		func(name, guest string) bool { return name == guest }, func(*unit, string) {})
	return how.loser, err
}

// Openings lists the LUNs that are open to a second initiator, for use after a restart.
func (d *Device) Openings() (openings []Opening) {
	for _, u := range d.luns.Load().units {
		if h := u.handover.Load(); h.Guest != "" {
			openings = append(openings, Opening{LUN: u.number, To: h.Guest, Until: h.Until})
		}
	}
	return openings
}

// ending is the outcome for a unit that was open to a guest.
type ending struct {
	guest string // the initiator that it was open to
	owner string // the new owner; "": nobody
	loser string // the initiator that is fenced; "": nobody
}

// fenceOff closes a LUN that is open to a guest. find decides the outcome, or why there can be
// none; commit applies it. Both run with Device.mu held. Initiators for which fenced is true lose
// their registrations and reservations and no longer prevent removal of the medium: they could not
// undo these themselves any more, and whoever may use the LUN would run into them.
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
	// A MODE SELECT or SANITIZE that is being saved takes effect first. Later ones find the fence.
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
		r.unsaved = true // storage has the new state and needs the old one back
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

// withdrawal is the outcome of Withdraw: the guest is fenced.
func (u *unit) withdrawal() (ending, error) {
	guest := u.handover.Load().Guest
	if guest == "" {
		return ending{}, fmt.Errorf("LUN %d is open to nobody but its owner", u.number)
	}
	return ending{guest: guest, owner: u.ownerName(), loser: guest}, nil
}

// heirLocked is the outcome of HandOver: the guest is the owner, and the former owner is fenced.
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

// exclusiveUnit finds a unit with exclusive access and keeps its store until u.end.
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

// ownerName is the name of the unit's owner or last owner.
func (u *unit) ownerName() string {
	if owner := u.owner.Load(); owner != nil {
		return owner.name
	}
	return ""
}

// isGuest reports whether the nexus' initiator may use the unit beside its owner.
func (u *unit) isGuest(n *Nexus) bool { return u.handover.Load().Guest == n.initiator.name }

// isFenced reports whether a handover has fenced the nexus' initiator. The owner is never fenced.
func (u *unit) isFenced(n *Nexus) bool {
	return slices.Contains(u.handover.Load().Fenced, n.initiator.name)
}

// logFenced logs why a guest meets reservation conflicts, once for each session of a fenced
// initiator and each fence.
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
