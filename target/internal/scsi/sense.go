package scsi

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
)

// SenseKey is the broad class of a CHECK CONDITION (SPC-4 4.5.6).
type SenseKey uint8

// The sense keys.
const (
	NoSense        SenseKey = 0x0
	MediumError    SenseKey = 0x3
	HardwareError  SenseKey = 0x4
	IllegalRequest SenseKey = 0x5
	UnitAttention  SenseKey = 0x6
	DataProtect    SenseKey = 0x7
	CopyAborted    SenseKey = 0xa
	AbortedCommand SenseKey = 0xb
	Miscompare     SenseKey = 0xe
)

var senseKeyNames = map[SenseKey]string{NoSense: "NO SENSE", MediumError: "MEDIUM ERROR",
	HardwareError: "HARDWARE ERROR", IllegalRequest: "ILLEGAL REQUEST",
	UnitAttention: "UNIT ATTENTION", DataProtect: "DATA PROTECT", CopyAborted: "COPY ABORTED",
	AbortedCommand: "ABORTED COMMAND", Miscompare: "MISCOMPARE"}

func (k SenseKey) String() string {
	return cmp.Or(senseKeyNames[k], "sense key "+strconv.Itoa(int(k)))
}

// additional is an additional sense code and its qualifier, ASC<<8 | ASCQ (SPC-4 annex F).
type additional uint16

const (
	ascNone                  additional = 0x0000
	ascWriteError            additional = 0x0c00
	ascInvalidFieldInIU      additional = 0x0e03
	ascUnrecoveredRead       additional = 0x1100
	ascParameterListLength   additional = 0x1a00
	ascMiscompare            additional = 0x1d00
	ascInvalidOpcode         additional = 0x2000
	ascLBAOutOfRange         additional = 0x2100
	ascInvalidFieldInCDB     additional = 0x2400
	ascLUNNotSupported       additional = 0x2500
	ascInvalidFieldInList    additional = 0x2600
	ascWriteProtected        additional = 0x2700
	ascSoftwareWriteProtect  additional = 0x2702
	ascSpaceAllocationFailed additional = 0x2707
	ascPowerOnOrReset        additional = 0x2900
	ascBusDeviceReset        additional = 0x2903
	ascNexusLoss             additional = 0x2907
	ascModeChanged           additional = 0x2a01
	ascCapacityChanged       additional = 0x2a09
	ascClearedByOther        additional = 0x2f00
	ascSavingNotSupported    additional = 0x3900
	ascLUNsChanged           additional = 0x3f0e
	ascInternalFailure       additional = 0x4400

	// For persistent reservations.
	ascInvalidRelease         additional = 0x2604
	ascReservationsPreempted  additional = 0x2a03
	ascReservationsReleased   additional = 0x2a04
	ascRegistrationsPreempted additional = 0x2a05
	ascRegistrationResources  additional = 0x5504
)

// senseError is a CHECK CONDITION with the sense data for the initiator.
type senseError struct {
	key     SenseKey
	code    additional
	hasInfo bool
	info    uint64  // INFORMATION field: an LBA, or for MISCOMPARE a byte offset
	sks     [3]byte // SENSE KEY SPECIFIC; its first bit says that it is valid
}

func (e *senseError) Error() string {
	return fmt.Sprintf("%v %02x/%02x", e.key, uint8(e.code>>8), uint8(e.code))
}

// statusError ends a command with a status that carries no sense data.
type statusError Status

func (e statusError) Error() string { return Status(e).String() }

const errConflict = statusError(StatusReservationConflict)

// These are allocated once: some refusals are frequent, and an untrusted initiator can cause others
// again and again.
var (
	errInvalidOpcode = &senseError{key: IllegalRequest, code: ascInvalidOpcode}
	// errAborted ends an aborted command. It is never an answer.
	errAborted           = &senseError{key: AbortedCommand, code: ascNone}
	errLUNNotSupported   = &senseError{key: IllegalRequest, code: ascLUNNotSupported}
	errParameterLength   = &senseError{key: IllegalRequest, code: ascParameterListLength}
	errWriteProtected    = &senseError{key: DataProtect, code: ascWriteProtected}
	errSoftwareProtected = &senseError{key: DataProtect, code: ascSoftwareWriteProtect}
	errNoSpace           = &senseError{key: DataProtect, code: ascSpaceAllocationFailed}
	errInternal          = &senseError{key: HardwareError, code: ascInternalFailure}
	errSavingPages       = &senseError{key: IllegalRequest, code: ascSavingNotSupported}
	// The initiator's expected data transfer length is too short for a command that needs all of
	// its data.
	errShortTransfer = &senseError{key: IllegalRequest, code: ascInvalidFieldInIU}

	errInvalidRelease        = &senseError{key: IllegalRequest, code: ascInvalidRelease}
	errRegistrationResources = &senseError{key: IllegalRequest, code: ascRegistrationResources}
)

// CheckCondition is an error that Outcome turns into CHECK CONDITION with this sense data. It is
// for conditions that only the transport can detect, such as missing or unexpected data.
func CheckCondition(key SenseKey, asc, ascq uint8) error {
	return &senseError{key: key, code: additional(asc)<<8 | additional(ascq)}
}

// Bits of the first byte of a field pointer (SPC-4 4.5.2.4.2).
const (
	sksValid    = 0x80
	sksCDB      = 0x40
	sksBitValid = 0x08
)

// noBit marks a field pointer that names a byte, not a bit.
const noBit = -1

// invalidField refuses a CDB because of the field at byteOffset. bit is the field's highest bit, or
// noBit.
func invalidField(byteOffset, bit int) error {
	return &senseError{key: IllegalRequest, code: ascInvalidFieldInCDB,
		sks: fieldPointer(sksCDB, byteOffset, bit)}
}

// invalidParameter refuses a parameter list because of the field at byteOffset. bit is the field's
// highest bit, or noBit.
func invalidParameter(byteOffset, bit int) error {
	return &senseError{key: IllegalRequest, code: ascInvalidFieldInList,
		sks: fieldPointer(0, byteOffset, bit)}
}

func fieldPointer(flags byte, byteOffset, bit int) (p [3]byte) {
	p[0] = sksValid | flags
	if bit >= 0 {
		p[0] |= sksBitValid | byte(bit)
	}
	binary.BigEndian.PutUint16(p[1:], uint16(byteOffset))
	return p
}

// outOfRange refuses an address beyond the capacity and reports that address (SBC-3 4.14.1).
func outOfRange(lba uint64) error {
	return &senseError{key: IllegalRequest, code: ascLBAOutOfRange, hasInfo: true, info: lba}
}

// miscompare reports the offset of the first differing byte within the data that was sent for
// comparison (SBC-3 5.2).
func miscompare(offset int64) error {
	return &senseError{key: Miscompare, code: ascMiscompare, hasInfo: true, info: uint64(offset)}
}

// fixedSenseLen is the length of fixed format sense data in bytes.
const fixedSenseLen = 18

// appendTo appends the sense data in descriptor format (SPC-4 4.5.2) or in fixed format (SPC-4
// 4.5.3).
func (e *senseError) appendTo(buf []byte, descriptor bool) []byte {
	if descriptor {
		return e.appendDescriptors(buf)
	}
	var s [fixedSenseLen]byte
	s[0] = 0x70
	s[2] = byte(e.key)
	s[7] = fixedSenseLen - 8
	s[12], s[13] = byte(e.code>>8), byte(e.code)
	copy(s[15:], e.sks[:])
	// The fixed format has 32 bits for INFORMATION. Leave out a value that does not fit, with VALID
	// zero.
	if e.hasInfo && e.info <= math.MaxUint32 {
		s[0] |= 0x80
		binary.BigEndian.PutUint32(s[3:], uint32(e.info))
	}
	return append(buf, s[:]...)
}

func (e *senseError) appendDescriptors(buf []byte) []byte {
	start := len(buf)
	buf = append(buf, 0x72, byte(e.key), byte(e.code>>8), byte(e.code), 0, 0, 0, 0)
	if e.hasInfo {
		buf = append(buf, 0x00, 0x0a, 0x80, 0x00) // information descriptor, VALID
		buf = binary.BigEndian.AppendUint64(buf, e.info)
	}
	if e.sks[0]&sksValid != 0 {
		buf = append(buf, 0x02, 0x06, 0, 0, e.sks[0], e.sks[1], e.sks[2], 0)
	}
	buf[start+7] = byte(len(buf) - start - 8)
	return buf
}
