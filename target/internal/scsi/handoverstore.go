package scsi

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// handoverState is what a write-exclusive unit must know of handovers after a restart. It is never changed once it is published.
//
// Who lost a handover stays out when the one who won it is gone, as in a restart, with its connection or for good: its initiator
// comes back by itself and would write what is left of a guest that runs elsewhere by now, or did. Only an operator knows that nothing is.
type handoverState struct {
	Owner  string    `json:"owner,omitempty"`   // whom the unit belonged to then, and whom the next handover fences; "": nobody
	Guest  string    `json:"open_to,omitempty"` // the initiator that it is open to beside its owner; "": it is not open
	Until  time.Time `json:"until,omitzero"`    // see Device.Admit
	Fenced []string  `json:"fenced,omitempty"`  // who is kept out, oldest first
}

// maxFenced bounds what a unit knows of initiators that are fenced: of more the oldest are forgotten, as a disk may be handed over
// for years to names that never come back.
const maxFenced = 1024

// ended is the state after a handover: the loser, if any, is fenced, and the guest only if it is that.
func (s *handoverState) ended(how ending) *handoverState {
	fenced := slices.DeleteFunc(slices.Clone(s.Fenced), func(name string) bool { return name == how.guest || name == how.loser })
	if how.loser != "" {
		fenced = append(fenced, how.loser)
	}
	return &handoverState{Owner: how.owner, Fenced: fenced[max(0, len(fenced)-maxFenced):]}
}

func (s *handoverState) empty() bool { return s.Owner == "" && s.Guest == "" && len(s.Fenced) == 0 }

// valid reports whether the names are such that an initiator can have.
func (s *handoverState) valid() bool {
	return (s.Owner == "" || validInitiatorName(s.Owner)) && (s.Guest == "" || validInitiatorName(s.Guest)) &&
		!slices.ContainsFunc(s.Fenced, func(name string) bool { return !validInitiatorName(name) })
}

// saveHandover brings next to storage, ahead of what makes it the unit's own. The caller has persistent.mu.
func (u *unit) saveHandover(next *handoverState) error {
	err := u.storeHandover(next)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("who may use LUN %d could not be saved, and stays as it was: %w", u.number, err)
	// It may be there all the same, and the next start must not go by what was refused.
	if u.storeHandover(u.handover.Load()) != nil {
		return fmt.Errorf("%w; ask again before the daemon is restarted, which would go by one or the other", err)
	}
	return err
}

func (u *unit) storeHandover(s *handoverState) (err error) {
	if u.store == nil {
		return nil
	}
	var data []byte
	if !s.empty() {
		if data, err = json.Marshal(s); err != nil {
			return err
		}
	}
	return u.store.Save(storedHandover, data)
}

// restoreHandover takes up what the store has kept of handovers. A unit that was open is so again. It still belongs to its owner,
// who has no nexus yet: others can take it like one that he has left, unless it is open.
func (u *unit) restoreHandover() error {
	s := &handoverState{}
	if u.store != nil && u.exclusive {
		content, err := u.store.Load(storedHandover)
		if err != nil {
			return fmt.Errorf("what a handover has left, without which it is unknown who may write to the disk: %w", err)
		}
		if len(content) > 0 {
			if err = json.Unmarshal(content, s); err == nil && !s.valid() {
				err = errors.New("it has a name that no initiator can have")
			}
		}
		if err != nil {
			return fmt.Errorf("what a handover has left cannot be read, and who may write to the disk is unknown: make sure that one machine has the guest, "+
				"and remove %s to start with nobody fenced: %w", u.store.Where(storedHandover), err)
		}
	}
	u.handover.Store(s)
	if s.Owner != "" {
		u.owner.Store(&initiator{name: s.Owner})
	}
	return nil
}
