package scsi

import (
	"fmt"

	"kubevirt.io/disk/serving"
)

// The names under which a logical unit keeps things.
const (
	storedErase        = "sanitize" // by versions that had SANITIZE
	storedAtomic       = serving.StoredAtomic
	storedReservations = "reservations"
)

// restore loads the state from the store.
func (u *unit) restore() error {
	if err := u.unfinishedErase(); err != nil {
		return err
	}
	u.mode.bits.Store(modeDefault)
	if err := u.restoreReservations(); err != nil {
		return err
	}
	u.forgetReservationsOfFenced()
	return u.undoAtomic()
}

// unfinishedErase refuses a disk that an earlier version was told to erase, and did not to the end.
func (u *unit) unfinishedErase() error {
	if u.Store == nil {
		return nil
	}
	switch data, err := u.Store.Load(storedErase); {
	case err != nil:
		return fmt.Errorf("load %s: %w", storedErase, err)
	case len(data) > 0:
		return fmt.Errorf("an initiator had an earlier version erase this disk (SANITIZE), which "+
			"has not ended: its content is partly destroyed. Remove %s to serve what is left",
			u.Store.Where(storedErase))
	}
	return nil
}
