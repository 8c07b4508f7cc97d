package scsi

import (
	"errors"
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

// diagnose finds the sense data of a disk's error.
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
		s := &senseError{key: MediumError, code: ascUnrecoveredRead, hasInfo: true,
			info: uint64(max(medium.Off, 0)) >> t.unit.shift}
		if cause == faultWrite {
			s.code = ascWriteError
		}
		// Linux assumes that all blocks before the named one are written (sd_completed_bytes).
		// Storage may have failed while reading around the write, before anything was stored. So
		// name the first block that was not stored, not the one where storage failed.
		if write, ok := errors.AsType[*writeError](err); ok {
			s.hasInfo, s.info = !write.durably, uint64(write.stored)>>t.unit.shift
		}
		return s
	}
	return errInternal
}

// fault is a cause of failing commands that the log tells apart.
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

// faultNames are the kinds of trouble (status.Trouble). A fault without a name is none: a disk that
// has failed has a state of its own, and so has a command that runs in the background.
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
