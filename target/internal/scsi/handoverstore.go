package scsi

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
)

// handoverState is the knowledge about handovers that a write-exclusive unit needs after a restart.
// It never changes once it is published.
//
// The loser of a handover stays fenced when the winner is gone, whether for a restart, with its
// connection or for good. The loser's initiator logs in again by itself. It would write the remains
// of a guest that runs elsewhere by now, or did. Only an operator knows that no such guest is left.
type handoverState struct {
	// the last owner, which the next handover fences; "": nobody
	Owner string `json:"owner,omitempty"`
	// the initiator that may use it beside its owner; "": nobody
	Guest  string    `json:"open_to,omitempty"`
	Until  time.Time `json:"until,omitzero"`   // see Device.Admit
	Fenced []string  `json:"fenced,omitempty"` // fenced initiators, oldest first
}

// maxFenced bounds how many fenced initiators a unit remembers. Beyond that it forgets the oldest:
// a disk may be handed over for years to names that never come back.
const maxFenced = 1024

// ended returns the state after a handover. The loser, if any, is fenced. The guest is not fenced
// unless it is the loser.
func (s *handoverState) ended(how ending) *handoverState {
	fenced := slices.DeleteFunc(slices.Clone(s.Fenced),
		func(name string) bool { return name == how.guest || name == how.loser })
	if how.loser != "" {
		fenced = append(fenced, how.loser)
	}
	return &handoverState{Owner: how.owner, Fenced: fenced[max(0, len(fenced)-maxFenced):]}
}

// encode returns the stored form of the state. It fails if RFC 3339 cannot express the year of
// Until.
func (s *handoverState) encode() ([]byte, error) {
	if s.Owner == "" && s.Guest == "" && len(s.Fenced) == 0 {
		return nil, nil
	}
	return json.Marshal(s)
}

// valid reports whether an initiator could have each of the names.
func (s *handoverState) valid() bool {
	return (s.Owner == "" || validInitiatorName(s.Owner)) &&
		(s.Guest == "" || validInitiatorName(s.Guest)) &&
		!slices.ContainsFunc(s.Fenced, func(name string) bool { return !validInitiatorName(name) })
}

// saveHandover stores next before the caller publishes it. The caller has persistent.mu.
func (u *unit) saveHandover(next *handoverState) error {
	data, err := next.encode()
	if err == nil {
		before, _ := u.handover.Load().encode() // it has been saved, or read
		_, err = replaceStored(u.store, storedHandover, data, before)
	}
	if err != nil {
		return fmt.Errorf("who may use LUN %d could not be saved, and stays as it was: %w",
			u.number, err)
	}
	return nil
}

// keepOwner stores the name of the unit's owner if it has changed. The next handover has to fence
// that owner even if it has not been seen since a restart. Commands that have claimed the unit call
// this before they are answered. They claim it in Prepare, which waits for no storage, so it cannot
// happen there. If saving fails, service goes on: the name only matters after a restart.
func (d *Device) keepOwner(u *unit) {
	if !u.exclusive.Load() || u.store == nil || u.owner.Load() == u.kept.Load() {
		return
	}
	u.persistent.mu.Lock()
	defer u.persistent.mu.Unlock()
	owner := u.owner.Load()
	next := *u.handover.Load()
	if u.kept.Swap(owner) == owner || next.Owner == owner.name {
		return
	}
	next.Owner = owner.name
	data, err := next.encode()
	if err == nil {
		// If the state was stored despite an error, that does no harm: it is right.
		err = u.store.Save(storedHandover, data)
	}
	if err != nil {
		d.log.Warn("who uses the LUN could not be saved: a handover fences this initiator only "+
			"if it comes before the daemon is restarted, or this "+
			"initiator has used the LUN again by then", zap.Uint16("lun", u.number),
			zap.String("initiator", owner.name), zap.Error(err))
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	u.handover.Store(&next)
}

// restoreHandover loads the stored state. A unit that was open is open again. It still belongs to
// its owner, which has no nexus yet. Unless the unit is open, others can claim it as if that owner
// had left.
func (u *unit) restoreHandover() error {
	s := &handoverState{}
	if u.store != nil && u.exclusive.Load() {
		content, err := u.store.Load(storedHandover)
		if err != nil {
			return fmt.Errorf("what a handover has left, without which it is unknown who may "+
				"write to the disk: %w", err)
		}
		if len(content) > 0 {
			if err = json.Unmarshal(content, s); err == nil && !s.valid() {
				err = errors.New("it has a name that no initiator can have")
			}
		}
		if err != nil {
			return fmt.Errorf("what a handover has left cannot be read, and who may write to the "+
				"disk is unknown: make sure that one machine has the guest, "+
				"and remove %s to start with nobody fenced: %w", u.store.Where(storedHandover), err)
		}
	}
	u.handover.Store(s)
	u.forgetReservationsOfFenced()
	if s.Owner != "" {
		u.owner.Store(&initiator{name: s.Owner})
	}
	return nil
}

// forgetReservationsOfFenced finishes a fence that was interrupted, for example by a kill. The list
// of fenced initiators is saved first, so their reservations may still be stored.
func (u *unit) forgetReservationsOfFenced() {
	s, r := u.handover.Load(), &u.persistent
	before := r.state.Load()
	e := before.without(func(name string) bool {
		return name != s.Guest &&
			slices.Contains(s.Fenced, name)
	})
	if len(e.registrations) < len(before.registrations) {
		e.generation = before.generation
		r.state.Store(&e.persistentState)
		r.unsaved = true
	}
}
