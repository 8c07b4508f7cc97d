package scsi

import (
	"encoding/binary"
	"encoding/hex"
)

// preparePersistIn begins a PERSISTENT RESERVE IN (SPC-4 6.15). It is refused while any nexus,
// including this one, has reserved the unit by RESERVE(6) (SPC-2 5.5.1).
func preparePersistIn(t *Task, parameters func(*Task, *persistentState, []byte) []byte) error {
	if t.unit.reserved.Load() != nil {
		return errConflict
	}
	t.data = parameters(t, t.unit.persistent.state.Load(), t.data[:0])
	t.reply(uint32(binary.BigEndian.Uint16(t.CDB[7:])))
	return nil
}

// appendGeneration appends PRGENERATION and an empty length field, which finishList fills in at
// offset 4.
func appendGeneration(b []byte, s *persistentState) []byte {
	return append(binary.BigEndian.AppendUint32(b, s.generation), 0, 0, 0, 0)
}

// finishList fills in the ADDITIONAL LENGTH. It counts all existing data, even if less is
// transferred. omitted is the number of bytes that are not in b.
func finishList(b []byte, omitted int) []byte {
	binary.BigEndian.PutUint32(b[4:], uint32(len(b)-8+omitted))
	return b
}

// prepareReadKeys is READ KEYS (SPC-4 6.15.2). It returns one reservation key for each
// registration.
func prepareReadKeys(t *Task) error {
	return preparePersistIn(t, func(_ *Task, s *persistentState, b []byte) []byte {
		b = appendGeneration(b, s)
		for i := range s.registrations {
			b = binary.BigEndian.AppendUint64(b, s.registrations[i].key)
		}
		return finishList(b, 0)
	})
}

// prepareReadReservation is READ RESERVATION (SPC-4 6.15.3).
func prepareReadReservation(t *Task) error {
	return preparePersistIn(t, func(_ *Task, s *persistentState, b []byte) []byte {
		b = appendGeneration(b, s)
		if s.kind != typeNone {
			b = binary.BigEndian.AppendUint64(b, s.reservationKey())
			b = append(b, 0, 0, 0, 0, 0, scopeLU<<4|byte(s.kind), 0, 0)
		}
		return finishList(b, 0)
	})
}

// Bits of the REPORT CAPABILITIES parameter data (SPC-4 6.15.4).
const (
	bitCRH   = 0x10 // RESERVE(6) and RELEASE(6) of holders and registrants are tolerated
	bitATPC  = 0x04 // ALL_TG_PT
	bitPTPLC = 0x01 // persist through power loss: possible
	bitTMV   = 0x80 // the type mask is valid
	bitPTPLA = 0x01 // persist through power loss: active

	// allowReady says that TEST UNIT READY passes every persistent reservation, and nothing about
	// other commands.
	allowReady = 0x10
)

// prepareReportCapabilities is REPORT CAPABILITIES (SPC-4 6.15.4).
func prepareReportCapabilities(t *Task) error {
	return preparePersistIn(t, func(t *Task, s *persistentState, b []byte) []byte {
		can, is := byte(bitCRH|bitATPC), byte(bitTMV|allowReady)
		if t.unit.persistent.store != nil {
			can |= bitPTPLC
		}
		if s.aptpl {
			is |= bitPTPLA
		}
		var types uint16
		for kind := range reservationTypes {
			if reservationType(kind).valid() {
				// Types 0h to 7h are bits of the first byte, types from 8h on are bits of the
				// second.
				types |= 1 << ((kind + 8) % 16)
			}
		}
		b = append(b, 0, 8, can, is)
		b = binary.BigEndian.AppendUint16(b, types)
		return append(b, 0, 0)
	})
}

// maxPersistIn is the highest ALLOCATION LENGTH in bytes. Data beyond it is never transferred, so
// it is not kept in memory.
const maxPersistIn = 0xffff

// prepareReadFullStatus is READ FULL STATUS (SPC-4 6.15.5). It returns every registration with its
// port.
func prepareReadFullStatus(t *Task) error {
	return preparePersistIn(t, func(_ *Task, s *persistentState, b []byte) []byte {
		const allTargetPorts, reservationHolder = 0x02, 0x01
		b = appendGeneration(b, s)
		omitted := 0
		for i := range s.registrations {
			r, start := &s.registrations[i], len(b)
			b = binary.BigEndian.AppendUint64(b, r.key)
			var state, kind byte
			if r.allPorts {
				state |= allTargetPorts
			}
			if s.holds(r.port) {
				state |= reservationHolder
				kind = scopeLU<<4 | byte(s.kind)
			}
			b = append(b, 0, 0, 0, 0, state, kind, 0, 0, 0, 0, 0, relativePort)
			id := appendTransportID(nil, r.port)
			b = binary.BigEndian.AppendUint32(b, uint32(len(id)))
			b = append(b, id...)
			if start >= maxPersistIn {
				omitted += len(b) - start
				b = b[:start]
			}
		}
		return finishList(b, omitted)
	})
}

// appendTransportID appends the TransportID of an iSCSI initiator port (SPC-4 7.6.4.6):
//
//	0      FORMAT CODE 01b (bits 7-6), PROTOCOL IDENTIFIER 5h (bits 3-0)
//	1      reserved
//	2-3    ADDITIONAL LENGTH: of what follows, a multiple of 4, at least 20
//	4-     the iSCSI name, ",i,0x", the ISID in hexadecimal digits, and at least one zero byte
func appendTransportID(b []byte, p InitiatorPort) []byte {
	const formatOfPort, protocolISCSI, minLength = 0x40, 0x05, 20
	name := nameString(p.Name + ",i,0x" + hex.EncodeToString(p.ISID[:]))
	for len(name) < minLength {
		name = append(name, 0)
	}
	b = append(b, formatOfPort|protocolISCSI, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(name)))
	return append(b, name...)
}
