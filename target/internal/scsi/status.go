// Package scsi is the SCSI device server behind the target. It takes command descriptor blocks
// (CDBs) and answers with data, a status and sense data. It knows nothing of the transport.
//
// The standards are SAM-5 (architecture), SPC-4 (primary commands) and SBC-3 (block commands).
// Multi-byte fields are big-endian. Logical blocks are those of serving.Options.BlockSize.
//
// The transport drives one Task per command:
//
//	Prepare   looks up logical unit and operation code, validates everything, never waits for a disk
//	In        any number of times, for a command that reads, in ascending order
//	Out       any number of times, for a command that writes, in ascending order
//	Finish    what remains, such as a flush; the only source of the final status
//	Outcome   turns the error of any of these into a status and sense data
//
// opcodes.go lists every command. Each command family has a file of its own. A command that is not
// listed there is refused, never acknowledged.
package scsi

import (
	"cmp"
	"strconv"
)

// Status is the SCSI status code (SAM-5 5.3.1).
type Status uint8

// The status codes.
const (
	StatusGood                Status = 0x00
	StatusCheckCondition      Status = 0x02
	StatusConditionMet        Status = 0x04
	StatusBusy                Status = 0x08
	StatusReservationConflict Status = 0x18
	StatusTaskAborted         Status = 0x40
)

var statusNames = map[Status]string{StatusGood: "GOOD", StatusCheckCondition: "CHECK CONDITION",
	StatusConditionMet: "CONDITION MET", StatusBusy: "BUSY",
	StatusReservationConflict: "RESERVATION CONFLICT", StatusTaskAborted: "TASK ABORTED"}

func (s Status) String() string {
	return cmp.Or(statusNames[s], "status "+strconv.Itoa(int(s)))
}

// Direction says which way a command's data moves, as the initiator sees it.
type Direction uint8

// The directions.
const (
	DirNone Direction = iota
	DirIn             // to the initiator
	DirOut            // from the initiator
)
