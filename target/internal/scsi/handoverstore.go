package scsi

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
)

// handoverState is what a write-exclusive unit must know of handovers after a restart. It is never
// changed once it is published.
//
// Who lost a handover stays out when the one who won it is gone, as in a restart, with its
// connection or for good: its initiator comes back by itself and would write what is left of a
// guest that runs elsewhere by now, or did. Only an operator knows that nothing is.
type handoverState struct {
	// whom the unit belonged to last, and whom the next handover fences; "": nobody
	Owner string `json:"owner,omitempty"`
	// the initiator that it is open to beside its owner; "": it is not open
	Guest  string    `json:"open_to,omitempty"`
	Until  time.Time `json:"until,omitzero"`   // see Device.Admit
	Fenced []string  `json:"fenced,omitempty"` // who is kept out, oldest first
}

// maxFenced bounds what a unit knows of initiators that are fenced: of more the oldest are
// forgotten, as a disk may be handed over for years to names that never come back.
const maxFenced = 1024

// ended is the state after a handover: the loser, if any, is fenced, and the guest only if it is
// that.
func (s *handoverState) ended(how ending) *handoverState {
	fenced := slices.DeleteFunc(slices.Clone(s.Fenced),
		func(name string) bool { return name == how.guest || name == how.loser })
	if how.loser != "" {
		fenced = append(fenced, how.loser)
	}
	return &handoverState{Owner: how.owner, Fenced: fenced[max(0, len(fenced)-maxFenced):]}
}

// encode is what is kept of the state. It fails where Until is in no year that RFC 3339 can write.
func (s *handoverState) encode() ([]byte, error) {
	if s.Owner == "" && s.Guest == "" && len(s.Fenced) == 0 {
		return nil, nil
	}
	return json.Marshal(s)
}

// valid reports whether the names are such that an initiator can have.
func (s *handoverState) valid() bool {
	return (s.Owner == "" || validInitiatorName(s.Owner)) &&
		(s.Guest == "" || validInitiatorName(s.Guest)) &&
		!slices.ContainsFunc(s.Fenced, func(name string) bool { return !validInitiatorName(name) })
}

// saveHandover brings next to storage, ahead of what makes it the unit's own. The caller has
// persistent.mu.
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

// keepOwner brings the name of the unit's owner to storage, as long as another one is there: the
// next handover has to fence him also where he has not been seen since a restart. It is called by
// commands that have claimed the unit, before they are answered. Prepare, where they claim it,
// waits for no storage. A failure ends no service: without a restart nothing is lost by it.
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
		err = u.store.Save(storedHandover, data) // if it is there in spite of an error, it is right
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

// restoreHandover takes up what the store has kept of handovers. A unit that was open is so again.
// It still belongs to its owner, who has no nexus yet: others can take it like one that he has
// left, unless it is open.
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

// forgetReservationsOfFenced ends what a fence that was interrupted, as by a kill, has left of
// them: it is saved who is fenced first.
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
