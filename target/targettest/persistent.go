package targettest

import "encoding/binary"

// The service actions of PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16).
const (
	ReadKeys           uint8 = 0x00
	ReadReservation    uint8 = 0x01
	ReportCapabilities uint8 = 0x02
	ReadFullStatus     uint8 = 0x03

	PersistRegister        uint8 = 0x00
	PersistReserve         uint8 = 0x01
	PersistRelease         uint8 = 0x02
	PersistClear           uint8 = 0x03
	PersistPreempt         uint8 = 0x04
	PersistPreemptAndAbort uint8 = 0x05
	PersistRegisterIgnore  uint8 = 0x06
)

// The types of persistent reservations (SPC-4 6.15.3.4).
const (
	WriteExclusive        uint8 = 0x1
	ExclusiveAccess       uint8 = 0x3
	WriteExclusiveRO      uint8 = 0x5 // registrants only
	ExclusiveAccessRO     uint8 = 0x6
	WriteExclusiveShared  uint8 = 0x7 // all registrants
	ExclusiveAccessShared uint8 = 0x8
)

// Bits of a Persist (SPC-4 6.16.3).
const (
	AllTgPt uint8 = 0x04
	APTPL   uint8 = 0x01
)

// Persist is a PERSISTENT RESERVE OUT.
type Persist struct {
	Action         uint8
	Type           uint8
	Key, ActionKey uint64
	Bits           uint8
	More           []byte // after the basic parameter list
}

// PersistOut is a PERSISTENT RESERVE OUT with its parameter list.
func PersistOut(lun uint16, p Persist) Command {
	list := binary.BigEndian.AppendUint64(nil, p.Key)
	list = binary.BigEndian.AppendUint64(list, p.ActionKey)
	list = append(append(list, 0, 0, 0, 0, p.Bits, 0, 0, 0), p.More...)
	cdb := []byte{0x5f, p.Action, p.Type, 0, 0, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(cdb[5:], uint32(len(list)))
	return Command{LUN: lun, CDB: cdb, Write: list}
}

// PersistIn is a PERSISTENT RESERVE IN.
func PersistIn(lun uint16, action uint8, allocation int) Command {
	return Command{LUN: lun, CDB: []byte{0x5e, action, 0, 0, 0, 0, 0, byte(allocation >> 8),
		byte(allocation), 0}, Read: allocation}
}

// Reserve6 is a RESERVE(6).
func Reserve6(lun uint16) Command { return Command{LUN: lun, CDB: []byte{0x16, 0, 0, 0, 0, 0}} }
