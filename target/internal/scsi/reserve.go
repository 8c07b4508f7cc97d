package scsi

// finishReserve is RESERVE(6) (SPC-2 7.21): the nexus alone may use the unit until it releases it, ends or the unit is
// reset. A conflict has been found before, but another nexus may have been faster since.
func finishReserve(t *Task) (Status, error) {
	d, u := t.dev, t.unit
	d.mu.Lock()
	defer d.mu.Unlock()
	holder := u.reserved.Load()
	if _, attached := d.nexuses[t.Nexus]; !attached || holder != nil && holder != t.Nexus {
		return StatusReservationConflict, errConflict
	}
	u.reserved.Store(t.Nexus)
	return StatusGood, nil
}

// finishRelease is RELEASE(6) (SPC-2 7.17). Releasing what one does not hold is no error.
func finishRelease(t *Task) (Status, error) {
	t.unit.reserved.CompareAndSwap(t.Nexus, nil)
	return StatusGood, nil
}

// conflicts reports whether the unit is reserved for, or owned by, somebody else than the nexus.
func (d *Device) conflicts(u *unit, n *Nexus) bool {
	if holder := u.reserved.Load(); holder != nil && holder != n {
		return true
	}
	return u.exclusive && !d.admits(u, n)
}
