package scsi

import (
	"encoding/binary"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
)

// The stored record, big-endian:
//
//	0-1    version, 1
//	2      TYPE of the reservation, 0: none
//	3      zero
//	4-5    the holder: index of its registration, ffffh where there is none
//	6-7    number of registrations
//	8-     each registration: reservation key (8 bytes), ISID (6), ALL_TG_PT (1), length of the
//	       name (1), name
const (
	storeVersion   = 1
	storeHeaderLen = 8
	storeEntryLen  = 16 // and the name
	storeNoHolder  = 0xffff
)

// encode returns the stored form of the state. It is empty if a loss of power ends all reservations
// (SPC-4 5.13.5).
func (s *persistentState) encode() []byte {
	if !s.aptpl {
		return nil
	}
	b := append(binary.BigEndian.AppendUint16(nil, storeVersion), byte(s.kind), 0)
	holder := storeNoHolder
	if i, ok := s.index[s.holder]; ok && s.kind != typeNone && !s.kind.shared() {
		holder = i
	}
	b = binary.BigEndian.AppendUint16(b, uint16(holder))
	b = binary.BigEndian.AppendUint16(b, uint16(len(s.registrations)))
	for i := range s.registrations {
		r := &s.registrations[i]
		b = binary.BigEndian.AppendUint64(b, r.key)
		b = append(b, r.port.ISID[:]...)
		b = append(b, boolByte(r.allPorts), byte(len(r.port.Name)))
		b = append(b, r.port.Name...)
	}
	return b
}

func boolByte(v bool) byte {
	if v {
		return 1
	}
	return 0
}

var errStoreDamaged = errors.New("is damaged")

// decodePersistent decodes the result of encode. Empty data is a state without reservations.
func decodePersistent(b []byte) (*persistentState, error) {
	if len(b) == 0 {
		return &persistentState{}, nil
	}
	if len(b) < storeHeaderLen {
		return nil, errStoreDamaged
	}
	if v := binary.BigEndian.Uint16(b); v != storeVersion {
		return nil, fmt.Errorf("has version %d, and this program knows %d", v, storeVersion)
	}
	s := &persistentState{aptpl: true, kind: reservationType(b[2])}
	holder, count := int(binary.BigEndian.Uint16(b[4:])), int(binary.BigEndian.Uint16(b[6:]))
	rest := b[storeHeaderLen:]
	for range count {
		if len(rest) < storeEntryLen || len(rest) < storeEntryLen+int(rest[15]) {
			return nil, errStoreDamaged
		}
		r := registration{key: binary.BigEndian.Uint64(rest), allPorts: rest[14] == 1}
		copy(r.port.ISID[:], rest[8:14])
		r.port.Name = string(rest[storeEntryLen : storeEntryLen+int(rest[15])])
		if rest[14] > 1 || r.key == 0 || !serving.ValidName(r.port.Name) {
			return nil, errStoreDamaged
		}
		s.registrations = append(s.registrations, r)
		rest = rest[storeEntryLen+len(r.port.Name):]
	}
	s.reindex()
	single := s.kind != typeNone && s.kind.valid() && !s.kind.shared()
	switch {
	case len(rest) != 0, b[3] != 0, count > maxRegistrations, len(s.index) != count,
		s.kind != typeNone && !s.kind.valid(),
		single != (holder != storeNoHolder), single && holder >= count,
		s.kind != typeNone && count == 0:
		return nil, errStoreDamaged
	}
	if single {
		s.holder = s.registrations[holder].port
	}
	return s, nil
}

// restoreReservations loads the state from the unit's store.
func (u *unit) restoreReservations() error {
	store, state := u.persistent.store, &persistentState{}
	if store != nil {
		content, err := store.Load(storedReservations)
		if err != nil {
			return fmt.Errorf("its stored persistent reservations, without which it is unknown "+
				"who may write to the disk: %w", err)
		}
		if state, err = decodePersistent(content); err != nil {
			return fmt.Errorf("what is stored of its persistent reservations %w; who may write "+
				"to the disk is unknown: remove %s to start without reservations", err,
				store.Where(storedReservations))
		}
	}
	u.persistent.state.Store(state)
	return nil
}

// forgetReservationsOfFenced completes a fence that was interrupted, for example by a kill. The
// list of fenced initiators is saved first, so their reservations may still be stored.
func (u *unit) forgetReservationsOfFenced() {
	r := &u.persistent
	before := r.state.Load()
	e := before.withoutFenced(func(name string) bool { return !u.Kept(name) })
	if len(e.registrations) < len(before.registrations) {
		e.generation = before.generation
		r.state.Store(&e.persistentState)
		r.unsaved = true
	}
}

// The names of the records in a unit's store.
const (
	storedAtomic       = disk.StoredAtomic
	storedReservations = "reservations"
)

// restore loads the state from the store.
func (u *unit) restore() error {
	u.mode.bits.Store(modeDefault)
	if err := u.restoreReservations(); err != nil {
		return err
	}
	u.forgetReservationsOfFenced()
	return u.undoAtomic()
}
