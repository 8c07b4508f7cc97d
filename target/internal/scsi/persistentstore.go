package scsi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
)

// ReservationStore keeps the persistent reservations of one logical unit through a loss of power (APTPL, SPC-4 5.13.5).
// Its methods are called by one goroutine at a time.
type ReservationStore interface {
	// Load returns what was saved last, or nothing if nothing ever was.
	Load() ([]byte, error)
	// Save replaces what was saved. When it returns nil the new content is durable; after an error the old or the new
	// content is there, never a mixture.
	Save([]byte) error
}

// What is stored, big-endian:
//
//	0-3    "KDPR"
//	4-5    version, 1
//	6      1: the reservations survive a loss of power (APTPL); 0: there are none below
//	7      TYPE of the reservation, 0: none
//	8-9    the holder: index of its registration, ffffh where there is none
//	10-11  number of registrations
//	12-    each registration: reservation key (8 bytes), ISID (6), ALL_TG_PT (1), length of the name (1), name
//	last 4 CRC-32C of all before
const (
	storeMagic      = "KDPR"
	storeVersion    = 1
	storeHeaderLen  = 12
	storeEntryLen   = 16 // and the name
	storeTrailerLen = 4
	storeNoHolder   = 0xffff
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encode is what has to be stored of the state.
func (s *persistentState) encode() []byte {
	b := binary.BigEndian.AppendUint16([]byte(storeMagic), storeVersion)
	if !s.aptpl {
		s = &persistentState{} // a loss of power ends everything (SPC-4 5.13.5)
	}
	b = append(b, boolByte(s.aptpl), byte(s.kind))
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
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func boolByte(v bool) byte {
	if v {
		return 1
	}
	return 0
}

var (
	errStoreDamaged  = errors.New("is damaged")
	errStoreChecksum = errors.New("is damaged: its checksum is wrong")
)

// decodePersistent reads what encode has written. Nothing at all is a state without reservations.
func decodePersistent(b []byte) (*persistentState, error) {
	if len(b) == 0 {
		return &persistentState{}, nil
	}
	switch {
	case len(b) < storeHeaderLen+storeTrailerLen || string(b[:4]) != storeMagic:
		return nil, errStoreDamaged
	case binary.BigEndian.Uint32(b[len(b)-storeTrailerLen:]) != crc32.Checksum(b[:len(b)-storeTrailerLen], castagnoli):
		return nil, errStoreChecksum
	}
	if v := binary.BigEndian.Uint16(b[4:]); v != storeVersion {
		return nil, fmt.Errorf("has version %d, and this program knows %d", v, storeVersion)
	}
	s := &persistentState{aptpl: b[6] == 1, kind: reservationType(b[7])}
	holder, count := int(binary.BigEndian.Uint16(b[8:])), int(binary.BigEndian.Uint16(b[10:]))
	rest := b[storeHeaderLen : len(b)-storeTrailerLen]
	for range count {
		if len(rest) < storeEntryLen || len(rest) < storeEntryLen+int(rest[15]) {
			return nil, errStoreDamaged
		}
		r := registration{key: binary.BigEndian.Uint64(rest), allPorts: rest[14] == 1}
		copy(r.port.ISID[:], rest[8:14])
		r.port.Name = string(rest[storeEntryLen : storeEntryLen+int(rest[15])])
		if rest[14] > 1 || r.key == 0 || !validInitiatorName(r.port.Name) {
			return nil, errStoreDamaged
		}
		s.registrations = append(s.registrations, r)
		rest = rest[storeEntryLen+len(r.port.Name):]
	}
	s.reindex()
	single := s.kind != typeNone && s.kind.valid() && !s.kind.shared()
	switch {
	case len(rest) != 0, b[6] > 1, count > maxRegistrations, len(s.index) != count,
		s.kind != typeNone && !s.kind.valid(),
		single != (holder != storeNoHolder), single && holder >= count,
		(s.kind != typeNone || count > 0) && (!s.aptpl || count == 0):
		return nil, errStoreDamaged
	}
	if single {
		s.holder = s.registrations[holder].port
	}
	return s, nil
}

// loadReservations reads what the unit's store holds.
func (u *unit) loadReservations(store ReservationStore) error {
	u.persistent.store = store
	state := &persistentState{}
	if store != nil {
		b, err := store.Load()
		if err != nil {
			return fmt.Errorf("its stored persistent reservations cannot be read: %w", err)
		}
		if state, err = decodePersistent(b); err != nil {
			return fmt.Errorf("what is stored of its persistent reservations %w; who may write to the disk is unknown: "+
				"remove it to start without reservations", err)
		}
	}
	u.persistent.state.Store(state)
	return nil
}

// portsOf are the initiator ports of this name that are known, in no order.
func (d *Device) portsOf(name string) (ports []InitiatorPort) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for p := range d.known {
		if p.Name == name {
			ports = append(ports, p)
		}
	}
	// d.known is bounded; a port that found no place in it may be here.
	for n := range d.nexuses {
		if n.port.Name == name && !slices.Contains(ports, n.port) {
			ports = append(ports, n.port)
		}
	}
	return ports
}
