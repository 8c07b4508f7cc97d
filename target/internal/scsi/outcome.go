// Package scsi is the SCSI device server behind the target. It executes command descriptor blocks
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
	"errors"
	"strconv"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// Outcome turns the error of Prepare, In, Out or Finish into the status of the command and its
// sense data. It appends the sense data to buf without a length prefix. No other place turns errors
// into sense data. An unknown error becomes HARDWARE ERROR, INTERNAL TARGET FAILURE, and its cause
// is logged.
func (d *Device) Outcome(t *Task, err error, buf []byte) (Status, []byte) {
	if err == nil {
		return StatusGood, buf
	}
	switch {
	case errors.Is(err, serving.ErrRemoved):
		err = errLUNNotSupported
	case errors.Is(err, serving.ErrAborted):
		err = errAborted
	}
	if status, ok := errors.AsType[statusError](err); ok {
		if Status(status) == StatusReservationConflict && t != nil && t.unit != nil {
			d.logConflict(t.unit, t.Nexus, t.cmd)
		}
		return Status(status), buf
	}
	if errors.Is(err, disk.ErrNotNow) {
		_, msg := serving.TroubleOf(err)
		d.logFault(t, faultNotNow, msg, err)
		return StatusBusy, buf
	}
	var sense *senseError
	if !errors.As(err, &sense) {
		sense = d.diagnose(t, err)
	}
	descriptor := t != nil && t.unit != nil && t.unit.mode.descriptorSense()
	return StatusCheckCondition, sense.appendTo(buf, descriptor)
}

// diagnose returns the sense data for a disk's error.
func (d *Device) diagnose(t *Task, err error) *senseError {
	if store, ok := errors.AsType[*storeError](err); ok {
		d.logFault(t, faultReservations, "reservations could not be saved", err)
		if disk.IsNoSpace(store.err) {
			return errNoSpace
		}
		return errInternal
	}
	kind, msg := serving.TroubleOf(err)
	cause := faultFailed
	if kind != "" {
		cause = faultOther
		for f, name := range faultNames {
			if name == kind {
				cause = fault(f)
			}
		}
	}
	d.logFault(t, cause, msg, err)
	switch cause {
	case faultNoSpace:
		return errNoSpace
	case faultReadOnly:
		return errWriteProtected
	case faultRead, faultWrite:
		var medium *disk.MediumError
		_ = errors.As(err, &medium)
		s := &senseError{key: MediumError, code: ascUnrecoveredRead,
			hasInfo: t.cmd.flags&writesMedium == 0,
			info:    uint64(max(medium.Off, 0)) >> t.unit.shift}
		if cause == faultWrite {
			s.code = ascWriteError
		}
		// Linux assumes that all blocks before the named one are written (sd_completed_bytes).
		// Storage may have failed while reading around the write, before anything was stored. So a
		// command that writes names the first block that was not stored, if that is known, and not
		// the block where storage failed.
		if write, ok := errors.AsType[*writeError](err); ok {
			s.hasInfo, s.info = !write.durably, uint64(write.stored)>>t.unit.shift
		}
		return s
	}
	return errInternal
}

// fault is a cause of failing commands, as the log distinguishes them.
type fault int

const (
	faultNoSpace fault = iota
	faultReadOnly
	faultFailed
	faultRead
	faultWrite
	faultReservations
	faultNotNow
	faultOther
	faultCount
)

// faultNames are the kinds of trouble (status.Trouble). A fault without a name is no trouble: a
// disk that has failed has a state of its own, and so has a command that runs in the background.
var faultNames = [faultCount]string{
	faultNoSpace: status.TroubleNoSpace, faultReadOnly: status.TroubleReadOnly,
	faultRead: status.TroubleReadError, faultWrite: status.TroubleWriteError,
	faultReservations: status.TroubleReservations, faultNotNow: status.TroubleNotNow,
	faultOther: status.TroubleOther}

// faultInterval is how often a cause is logged at most: an initiator retries a failing disk
// thousands of times a second.
const faultInterval = time.Minute

func (d *Device) logFault(t *Task, f fault, msg string, err error) {
	faults := d.faults
	fields := []zap.Field{zap.Error(err)}
	if t != nil {
		if t.unit != nil {
			faults = t.unit.faults
			if t.cmd != nil && faultNames[f] != "" {
				t.unit.Failed(faultNames[f], t.cmd.op, t.cmd.name, msg, err, time.Now())
			}
			fields = append(fields, zap.Uint16("lun", t.unit.Number))
		}
		if t.cmd != nil {
			fields = append(fields, zap.String("command", t.cmd.name))
		}
	}
	suppressed, ok := faults.Admit(f, time.Now())
	if !ok {
		return
	}
	level := zap.ErrorLevel
	if f == faultNotNow { // nothing is lost
		level = zap.WarnLevel
	}
	d.log.Log(level, msg, append(fields, serving.Unsaid(suppressed)...)...)
}

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
