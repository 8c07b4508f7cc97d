package scsi

import (
	"encoding/json"
	"fmt"

	"kubevirt.io/disk/serving"
)

// The names under which a logical unit keeps things.
const (
	storedMode         = "mode-pages"
	storedSanitize     = "sanitize"
	storedAtomic       = "atomic-write"
	storedReservations = "reservations"
)

// savedMode is the stored form of the mode pages.
type savedMode struct {
	WriteBack       bool `json:"write_cache_enabled"`
	DescriptorSense bool `json:"descriptor_format_sense"`
	WriteProtected  bool `json:"software_write_protect"`
}

func (s savedMode) state() (state uint32) {
	for _, f := range []struct {
		set bool
		bit uint32
	}{{s.WriteBack, modeWCE}, {s.DescriptorSense, modeDSense}, {s.WriteProtected, modeSWP}} {
		if f.set {
			state |= f.bit
		}
	}
	return state
}

func encodeMode(state uint32) []byte {
	// cannot fail: a struct of bools
	data, _ := json.Marshal(savedMode{state&modeWCE != 0, state&modeDSense != 0,
		state&modeSWP != 0})
	return data
}

// saveMode stores the mode pages.
func (u *unit) saveMode(state uint32) error {
	if _, err := serving.ReplaceStored(u.Store, storedMode, encodeMode(state),
		encodeMode(u.mode.saved.Load())); err != nil {
		return fmt.Errorf("save mode pages: %w", err)
	}
	u.mode.saved.Store(state)
	return nil
}

// interruptedSanitize is stored while a sanitize operation runs or has failed.
type interruptedSanitize struct {
	Unrestricted bool `json:"unrestricted"` // EXIT FAILURE MODE ends the failure
}

// encode returns the stored form with which the next start finds the unit in this phase.
func (p sanitizePhase) encode() []byte {
	if p == sanitizeNone {
		return nil
	}
	// cannot fail: a struct of a bool
	data, _ := json.Marshal(interruptedSanitize{Unrestricted: p == sanitizeFailedFree})
	return data
}

// rememberSanitize stores the phase in which the next start finds the unit. before is the phase
// that is stored now.
func (u *unit) rememberSanitize(next, before sanitizePhase) error {
	if _, err := serving.ReplaceStored(u.Store, storedSanitize, next.encode(),
		before.encode()); err != nil {
		return fmt.Errorf("record the sanitize operation: %w", err)
	}
	return nil
}

// restore loads the state from the store. A sanitize operation that did not end counts as failed.
func (u *unit) restore() error {
	u.mode.saved.Store(modeDefault)
	if u.Store != nil {
		var mode savedMode
		if found, err := u.load(storedMode, &mode); err != nil {
			return err
		} else if found {
			u.mode.saved.Store(mode.state())
		}
		var interrupted interruptedSanitize
		if found, err := u.load(storedSanitize, &interrupted); err != nil {
			return err
		} else if found {
			u.sanitizing.phase.Store(uint32(failedPhase(interrupted.Unrestricted)))
		}
	}
	u.mode.bits.Store(u.mode.saved.Load())
	if err := u.restoreReservations(); err != nil {
		return err
	}
	u.forgetReservationsOfFenced()
	return u.undoAtomic()
}

func (u *unit) load(name string, into any) (found bool, err error) {
	data, err := u.Store.Load(name)
	if err != nil {
		return false, fmt.Errorf("load %s: %w", name, err)
	}
	if len(data) == 0 {
		return false, nil
	}
	if err := json.Unmarshal(data, into); err != nil {
		return false, fmt.Errorf("what is kept as %s cannot be read, remove %s to start with "+
			"defaults: %w", name, u.Store.Where(name), err)
	}
	return true, nil
}
