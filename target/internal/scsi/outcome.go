package scsi

import (
	"errors"
	"runtime/debug"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
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
	var status statusError
	if errors.As(err, &status) {
		if Status(status) == StatusReservationConflict && t != nil && t.unit != nil {
			d.logConflict(t.unit, t.Nexus, t.cmd)
		}
		return Status(status), buf
	}
	if errors.Is(err, disk.ErrNotNow) {
		d.logFault(t, faultNotNow,
			"content that lies far away does not come: initiators are asked to try again", err)
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
	var medium *disk.MediumError
	var store *storeError
	failed := errors.Is(err, disk.ErrFailed) // takes precedence over its cause
	switch {
	case errors.As(err, &store):
		d.logFault(t, faultReservations, "reservations could not be saved", err)
		if disk.IsNoSpace(store.err) {
			return errNoSpace
		}
		return errInternal
	case errors.Is(err, disk.ErrNoSpace), !failed && disk.IsNoSpace(err): // also from a store
		d.logFault(t, faultNoSpace, "disk is full: writes fail until space is freed", err)
		return errNoSpace
	case errors.Is(err, disk.ErrReadOnly), !failed && errors.Is(err,
		syscall.EROFS): // although the unit may be written
		d.logFault(t, faultReadOnly, "storage has become read-only: writes fail until it is "+
			"repaired", err)
		return errWriteProtected
	case failed:
		d.logFault(t, faultFailed, "disk has failed: restart after repairing its storage", err)
		return errInternal
	case errors.As(err, &medium):
		s := &senseError{key: MediumError, code: ascUnrecoveredRead, hasInfo: true,
			info: uint64(max(medium.Off, 0)) >> blockShift}
		kind := faultRead
		if medium.Op == "write" {
			s.code, kind = ascWriteError, faultWrite
		}
		d.logFault(t, kind, "storage could not "+medium.Op+" a range of the disk", err)
		// Linux assumes that all blocks before the named one are written (sd_completed_bytes).
		// Storage may have failed while reading around the write, before anything was stored. So
		// name the first block that was not stored, not the one where storage failed.
		var write *writeError
		if errors.As(err, &write) {
			s.hasInfo, s.info = !write.durably, uint64(write.stored)>>blockShift
		}
		return s
	}
	d.logFault(t, faultOther, "command failed for an unexpected reason", err)
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
	faultSanitize
	faultReservations
	faultNotNow
	faultOther
	faultCount
)

// faultInterval is how often a cause is logged at most: an initiator retries a failing disk
// thousands of times a second.
const faultInterval = time.Minute

// faultLog remembers when each cause was logged last. The zero value is ready to use. Any number of
// goroutines may use it.
type faultLog struct {
	last       [faultCount]atomic.Int64 // nanoseconds since 1970; 0 never
	suppressed [faultCount]atomic.Int64
}

// admit reports whether the cause may be logged now, and how many times it was suppressed since the
// last time.
func (l *faultLog) admit(f fault, now time.Time) (suppressed int64, ok bool) {
	last := l.last[f].Load()
	if last != 0 && now.UnixNano()-last < int64(faultInterval) ||
		!l.last[f].CompareAndSwap(last, now.UnixNano()) {
		l.suppressed[f].Add(1)
		return 0, false
	}
	return l.suppressed[f].Swap(0), true
}

func (d *Device) logFault(t *Task, f fault, msg string, err error) {
	faults := &d.faults
	fields := []zap.Field{zap.Error(err)}
	if t != nil {
		if t.unit != nil {
			faults = &t.unit.faults
			t.unit.troubles.failed(f, t.cmd, msg, err, time.Now())
			fields = append(fields, zap.Uint16("lun", t.unit.Number))
		}
		if t.cmd != nil {
			fields = append(fields, zap.String("command", t.cmd.name))
		}
	}
	suppressed, ok := faults.admit(f, time.Now())
	if !ok {
		return
	}
	if suppressed > 0 {
		fields = append(fields, zap.Int64("not_logged_since", suppressed))
	}
	level := zap.ErrorLevel
	if f == faultNotNow { // nothing is lost
		level = zap.WarnLevel
	}
	d.log.Log(level, msg, fields...)
}

// panicked logs a panic in background work of the device.
func (d *Device) panicked(p any) {
	d.log.Error("internal error", zap.Any("panic", p), zap.ByteString("stack", debug.Stack()))
	if d.opt.Panicked != nil {
		d.opt.Panicked()
	}
}
