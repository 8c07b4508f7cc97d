package scsi

import (
	"encoding/json"
	"fmt"
)

// Store keeps what a logical unit must remember when the target is killed and, as far as its disk
// survives that, after a loss of power. It belongs to the content of the disk: when that is
// replaced, the store must begin empty. A name is a few lower case letters and hyphens. Any number
// of goroutines may call the methods.
type Store interface {
	// Load returns the last saved data of the name, or nil if there is none. It returns an error if
	// the data has changed since.
	Load(name string) ([]byte, error)
	// Save replaces the data under the name, completely or not at all. When it returns, the data is
	// as durable as a Flush makes the disk's content. Empty data deletes the name. Save does not
	// hold on to data.
	Save(name string, data []byte) error
	// Where tells a person where the data is, to look at it or to remove it.
	Where(name string) string
}

// replaceStored replaces before with next in the store. The unit uses before until that has
// succeeded. A failed Save may still have stored next, and the next start must not use it, so
// replaceStored then saves before again. If that fails too, unsure is true: the store may have
// either. A nil store keeps nothing.
func replaceStored(store Store, name string, next, before []byte) (unsure bool, err error) {
	if store == nil {
		return false, nil
	}
	if err = store.Save(name, next); err == nil || store.Save(name, before) == nil {
		return false, err
	}
	return true, fmt.Errorf("%w; ask again before the daemon is restarted, which would go by one "+
		"or the other", err)
}

// The names under which a logical unit keeps things.
const (
	storedMode         = "mode-pages"
	storedSanitize     = "sanitize"
	storedAtomic       = "atomic-write"
	storedReservations = "reservations"
	storedHandover     = "handover"
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
	if _, err := replaceStored(u.store, storedMode, encodeMode(state),
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
	if _, err := replaceStored(u.store, storedSanitize, next.encode(),
		before.encode()); err != nil {
		return fmt.Errorf("record the sanitize operation: %w", err)
	}
	return nil
}

// restore loads the state from the store. A sanitize operation that did not end counts as failed.
func (u *unit) restore() error {
	u.mode.saved.Store(modeDefault)
	if u.store != nil {
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
	if err := u.restoreHandover(); err != nil {
		return err
	}
	return u.undoAtomic()
}

func (u *unit) load(name string, into any) (found bool, err error) {
	data, err := u.store.Load(name)
	if err != nil {
		return false, fmt.Errorf("load %s: %w", name, err)
	}
	if len(data) == 0 {
		return false, nil
	}
	if err := json.Unmarshal(data, into); err != nil {
		return false, fmt.Errorf("what is kept as %s cannot be read, remove %s to start with "+
			"defaults: %w", name, u.store.Where(name), err)
	}
	return true, nil
}
