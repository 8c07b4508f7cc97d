package scsi

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"kubevirt.io/disk/serving"
)

// reservations are the persistent reservations of a logical unit.
//
// Each nexus keeps the rights that its commands need because of a reservation, persistent or by
// RESERVE(6) (nexusUnit.barred). So a check costs one atomic load. Every change computes the rights
// again.
//
// Lock order: reservations.mu, Device.mu.
type reservations struct {
	store serving.Store // nil: no reservation survives a loss of power

	// mu is held for a whole change, which may wait for the store.
	mu      sync.Mutex
	unsaved bool // guarded by mu; the store failed, and may have any of the last states

	state atomic.Pointer[persistentState] // never nil; written under mu and Device.mu
}

// changeReservations publishes the state that change returns. If that state must survive a loss of
// power, it is stored first. changeReservations returns the ports whose registrations were
// preempted. After an error nothing has changed.
func (d *Device) changeReservations(t *Task,
	change func(*persistentState) (*persistentEdit, error)) ([]InitiatorPort, error) {
	u := t.unit
	r := &u.persistent
	r.mu.Lock()
	defer r.mu.Unlock()
	// SPC-2 5.5.1: refused while any nexus has the unit reserved by RESERVE(6).
	if u.reserved.Load() != nil {
		return nil, errConflict
	}
	e, err := change(r.state.Load())
	if err != nil {
		return nil, err
	}
	if err := r.save(u.Number, &e.persistentState); err != nil {
		return nil, err
	}
	if err := t.stillWanted(); err != nil { // other initiators may have gone on while storage hung
		r.unsaved = true
		return nil, errors.Join(err, r.save(u.Number, r.state.Load()))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.publishLocked(u, e)
	return e.removed, nil
}

// publishLocked publishes the result of an edit and raises its unit attentions.
func (d *Device) publishLocked(u *unit, e *persistentEdit) {
	next := e.persistentState
	u.persistent.state.Store(&next)
	d.barLocked(u)
	for n := range d.nexuses {
		if c := e.notices[n.port]; c != 0 {
			n.raise(u, c)
		}
	}
}

// save stores next unless storage has the same already. The caller has mu.
func (r *reservations) save(lun uint16, next *persistentState) (err error) {
	p, before := next.encode(), r.state.Load().encode()
	if !r.unsaved && bytes.Equal(p, before) {
		return nil
	}
	if r.unsaved, err = serving.ReplaceStored(r.store, storedReservations, p, before); err != nil {
		return &storeError{fmt.Errorf("the persistent reservations of LUN %d could not be saved "+
			"and stay as they were: %w", lun, err)}
	}
	return nil
}

// storeError says that a change that must survive a loss of power could not be saved. It does not
// unwrap: an unreadable range of the store says nothing about the medium.
type storeError struct{ err error }

func (e *storeError) Error() string { return e.err.Error() }

// barLocked computes the rights that every nexus needs at the unit.
func (d *Device) barLocked(u *unit) {
	for n := range d.nexuses {
		if at := n.at(u); at != nil {
			at.barLocked(n)
		}
	}
}

// barLocked computes the rights that one nexus needs. The caller has Device.mu.
func (at *nexusUnit) barLocked(n *Nexus) {
	needs := at.unit.persistent.state.Load().bars(n.port)
	if holder := at.unit.reserved.Load(); holder != nil && holder != n {
		needs |= duringReserve
	}
	at.barred.Store(uint32(needs))
}

// reserveLocked makes the nexus (nil: nobody) the holder of the RESERVE(6) reservation.
func (d *Device) reserveLocked(u *unit, n *Nexus) {
	if u.reserved.Swap(n) != n {
		d.barLocked(u)
	}
}

// conflicts reports whether a command with these rights conflicts with a reservation or with the
// owner of the unit.
func (d *Device) conflicts(at *nexusUnit, n *Nexus, rights flags) bool {
	if flags(at.barred.Load())&^rights != 0 {
		return true
	}
	return rights&duringClaim == 0 && !n.Admitted(at.unit.served)
}

// rights returns the command's rights, including those that only some of its forms have.
func (c *command) rights(cdb *[16]byte) flags {
	if c.harmless != nil && c.harmless(cdb) {
		return c.flags | duringReservation
	}
	return c.flags
}

// finishReserve is RESERVE(6) (SPC-2 7.21). Only this nexus may use the unit until it releases the
// unit, ends, or the unit is reset. Prepare has looked for conflicts, but another nexus may have
// been faster since.
func finishReserve(t *Task) (Status, error) {
	d, u := t.dev, t.unit
	u.persistent.mu.Lock()
	defer u.persistent.mu.Unlock()
	if over, err := t.persistentOverrides(); over {
		return StatusGood, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := t.stillWanted(); err != nil { // a reset may have ended reservations meanwhile
		return StatusCheckCondition, err
	}
	holder := u.reserved.Load()
	_, attached := d.nexuses[t.Nexus]
	if !attached || holder != nil && holder != t.Nexus || !t.Nexus.Admitted(u.served) {
		return StatusReservationConflict, errConflict
	}
	d.reserveLocked(u, t.Nexus)
	return StatusGood, nil
}

// finishRelease is RELEASE(6) (SPC-2 7.17). It is no error if the nexus holds no reservation.
func finishRelease(t *Task) (Status, error) {
	d, u := t.dev, t.unit
	u.persistent.mu.Lock()
	defer u.persistent.mu.Unlock()
	if over, err := t.persistentOverrides(); over {
		return StatusGood, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// the nexus's reservation may have ended, and another one may have begun
	if err := t.stillWanted(); err != nil {
		return StatusCheckCondition, err
	}
	if u.reserved.Load() == t.Nexus {
		d.reserveLocked(u, nil)
	}
	return StatusGood, nil
}

// persistentOverrides reports whether registrations decide the result of RESERVE(6) or RELEASE(6),
// and which error it is. While there are registrations, these commands change nothing. They
// conflict (SPC-2 5.5.1) unless a persistent reservation gives the nexus access (SPC-4 5.13.3,
// CRH).
func (t *Task) persistentOverrides() (over bool, err error) {
	s := t.unit.persistent.state.Load()
	if len(s.registrations) == 0 {
		return false, nil
	}
	if s.kind != typeNone && s.admits(t.Nexus.port) {
		return true, nil
	}
	return true, errConflict
}
