package scsi

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// The parameter list of PERSISTENT RESERVE OUT (SPC-4 6.16.3):
//
//	0-7    RESERVATION KEY
//	8-15   SERVICE ACTION RESERVATION KEY
//	16-19  obsolete
//	20     SPEC_I_PT (bit 3), ALL_TG_PT (bit 2), APTPL (bit 0)
//	21     reserved
//	22-23  obsolete
//
// No port can be registered by another one: there is no SPEC_I_PT, and no REGISTER AND MOVE.
const (
	persistListLen = 24

	bitAllTgPt = 0x04
	bitAPTPL   = 0x01
)

// persistList is a parameter list.
type persistList struct {
	key       uint64
	actionKey uint64 // SERVICE ACTION RESERVATION KEY
	allPorts  bool
	aptpl     bool
}

func parsePersistList(p []byte) (l persistList, err error) {
	if len(p) != persistListLen {
		return l, errParameterLength
	}
	l.key = binary.BigEndian.Uint64(p)
	l.actionKey = binary.BigEndian.Uint64(p[8:])
	if extra := p[20] &^ (bitAllTgPt | bitAPTPL); extra != 0 {
		return l, invalidParameter(20, bits.Len8(extra)-1)
	}
	if p[21] != 0 {
		return l, invalidParameter(21, 7)
	}
	l.allPorts = p[20]&bitAllTgPt != 0
	l.aptpl = p[20]&bitAPTPL != 0
	return l, nil
}

// preparePersistOut begins a PERSISTENT RESERVE OUT (SPC-4 6.16).
func preparePersistOut(t *Task) error {
	switch {
	case binary.BigEndian.Uint32(t.CDB[5:]) != persistListLen:
		return errParameterLength
	case t.cmd.action != saReserve:
	case t.CDB[2]>>4 != scopeLU:
		return invalidField(2, 7)
	case !t.reservationType().valid():
		return invalidField(2, 3)
	}
	t.expect(persistListLen, true)
	return nil
}

func (t *Task) reservationType() reservationType { return reservationType(t.CDB[2] & 0x0f) }

// outPersist executes a PERSISTENT RESERVE OUT. It changes everything or, after an error, nothing.
// An initiator that registers or reserves uses the unit, so it becomes the owner of a
// write-exclusive unit.
func outPersist(t *Task, _ int64, p []byte) error {
	list, err := parsePersistList(p)
	if err != nil {
		return err
	}
	removed, err := t.dev.changeReservations(t,
		func(s *persistentState) (*persistentEdit, error) {
			// While the command waited for another, it may have been aborted, or the unit handed
			// over.
			if err := t.stillWanted(); err != nil {
				return nil, err
			}
			if !t.dev.claim(t.at, t.Nexus) {
				return nil, errConflict
			}
			e := s.edit(t.Nexus.port)
			return e, e.execute(t, &list)
		})
	t.dev.disks.KeepOwner(t.unit.served)
	if err == nil && t.cmd.action == saPreemptAndAbort {
		t.dev.abortPreempted(t, removed)
	}
	return err
}

// execute executes the service action of the task.
func (e *persistentEdit) execute(t *Task, list *persistList) error {
	own := e.find(e.by)
	if t.cmd.action == saRegister || t.cmd.action == saRegisterIgnore {
		if list.aptpl && t.unit.persistent.store == nil {
			return invalidParameter(20, 0)
		}
		return e.register(t, own, list)
	}
	if own == nil || own.key != list.key {
		return errConflict
	}
	switch t.cmd.action {
	case saReserve:
		return e.reserveFor(t.reservationType())
	case saRelease:
		return e.releaseOf(t)
	case saClear:
		e.clear()
	case saPreempt, saPreemptAndAbort:
		return e.preempt(t, list.actionKey)
	}
	return nil
}

// register is REGISTER and REGISTER AND IGNORE EXISTING KEY (SPC-4 5.13.7).
func (e *persistentEdit) register(t *Task, own *registration, list *persistList) error {
	switch {
	case own == nil && t.cmd.action == saRegister && list.key != 0:
		return errConflict
	case own != nil && t.cmd.action == saRegister && list.key != own.key:
		return errConflict
	case own == nil && list.actionKey == 0:
		return nil // SPC-4 table 52: do nothing but return GOOD
	}
	e.aptpl = list.aptpl
	e.generation++
	switch {
	case list.actionKey == 0:
		e.unregister()
		return nil
	case own != nil:
		own.key, own.allPorts = list.actionKey, list.allPorts
		return nil
	}
	return e.add(registration{port: e.by, key: list.actionKey, allPorts: list.allPorts})
}

// unregister removes the sender's own registration. The reservation ends with it unless others hold
// the reservation, too (SPC-4 5.13.11.3).
func (e *persistentEdit) unregister() {
	kind := e.kind
	e.remove(func(r *registration) bool { return r.port == e.by })
	if kind != typeNone && e.kind == typeNone && kind.registrants() {
		e.tell(attnReservationsReleased)
	}
}

// reserveFor is RESERVE (SPC-4 5.13.9).
func (e *persistentEdit) reserveFor(kind reservationType) error {
	if e.kind == typeNone {
		e.reserve(kind)
		return nil
	}
	if e.kind != kind || !e.holds(e.by) {
		return errConflict
	}
	return nil
}

// releaseOf is RELEASE (SPC-4 5.13.11.2). It is no error if the sender holds no reservation.
func (e *persistentEdit) releaseOf(t *Task) error {
	if !e.holds(e.by) {
		return nil
	}
	if t.CDB[2]>>4 != scopeLU || t.reservationType() != e.kind {
		return errInvalidRelease
	}
	if e.kind.registrants() {
		e.tell(attnReservationsReleased)
	}
	e.release()
	return nil
}

// clear is CLEAR (SPC-4 5.13.11.6).
func (e *persistentEdit) clear() {
	e.generation++
	e.tell(attnReservationsPreempted)
	e.remove(func(*registration) bool { return true })
}

// preempt is PREEMPT and PREEMPT AND ABORT (SPC-4 5.13.11.4). It removes all registrations with a
// key. If the holder has that key, the sender takes over the reservation. For a shared reservation
// the key is zero, which stands for every other registration.
func (e *persistentEdit) preempt(t *Task, key uint64) error {
	takeOver := e.kind != typeNone && e.reservationKey() == key
	if key == 0 && !takeOver {
		return invalidParameter(8, 7)
	}
	before := e.kind
	if takeOver && (t.CDB[2]>>4 != scopeLU || !t.reservationType().valid()) {
		if t.CDB[2]>>4 != scopeLU {
			return invalidField(2, 7)
		}
		return invalidField(2, 3)
	}
	matches := func(r *registration) bool { return r.key == key || key == 0 && e.kind.shared() }
	if !slices.ContainsFunc(e.registrations, func(r registration) bool { return matches(&r) }) {
		return errConflict
	}
	e.generation++
	// The new holder keeps its own registration, whatever its key.
	e.removed = e.remove(func(r *registration) bool {
		return matches(r) && !(takeOver && r.port == e.by)
	})
	for _, p := range e.removed {
		if p != e.by {
			e.notices[p] |= attnRegistrationsPreempted
		}
	}
	if takeOver {
		e.reserve(t.reservationType())
		if before != e.kind {
			e.tell(attnReservationsReleased)
		}
	}
	return nil
}
