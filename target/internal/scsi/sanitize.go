package scsi

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/serving"
)

// Bits and service actions of SANITIZE (SBC-4 5.30).
const (
	bitImmedSanitize = 0x80
	bitAUSE          = 0x20

	saOverwrite       = 0x01
	saBlockErase      = 0x02
	saCryptoErase     = 0x03
	saExitFailureMode = 0x1f

	bitInvert         = 0x80
	overwriteTestMask = 0x60
	overwriteCount    = 0x1f

	overwriteHeaderLen = 4
)

// sanitizePhase is the state of a logical unit's sanitize operation.
type sanitizePhase uint32

const (
	sanitizeNone       sanitizePhase = iota
	sanitizeRunning                  // commands end with SANITIZE IN PROGRESS
	sanitizeFailed                   // the medium is out of use until a SANITIZE succeeds
	sanitizeFailedFree               // as sanitizeFailed, but EXIT FAILURE MODE also ends it
)

// sanitizeState is a logical unit's sanitize operation (SBC-4 4.11). The operation goes on when its
// command or nexus ends, and through resets.
type sanitizeState struct {
	phase    atomic.Uint32
	progress atomic.Uint32 // in 65536ths

	// mu is also held while the start is saved. For its place in the lock order see modeState.
	mu      sync.Mutex
	running *sanitizeRun // guarded by mu; nil when none is in progress
}

// sanitizeRun is one operation.
type sanitizeRun struct {
	unit     *unit
	task     *Task // uses the disk; may wait as long as the unit exists
	action   byte
	free     bool   // AUSE: EXIT FAILURE MODE may end a failure
	passes   int    // of an overwrite
	invert   bool   // every other pass writes the pattern's complement
	pattern  []byte // one logical block
	done     chan struct{}
	err      error // valid when done is closed
	size     int64 // bytes of one pass; space added meanwhile was never written
	finished int64 // bytes done, in all passes
}

var (
	errSanitizeFailed = &senseError{key: MediumError, code: ascSanitizeFailed}
	errStopped        = errors.New("the target is stopping, or the LUN was removed")
	errPanicked       = errors.New("the disk failed unexpectedly")
)

// failedPhase is the phase after a failure.
func failedPhase(unrestricted bool) sanitizePhase {
	if unrestricted {
		return sanitizeFailedFree
	}
	return sanitizeFailed
}

// ready returns why a sanitize operation keeps the unit from executing commands, or nil. access
// says that the command needs the medium.
func (s *sanitizeState) ready(access bool) error {
	switch sanitizePhase(s.phase.Load()) {
	case sanitizeRunning:
		return s.inProgress()
	case sanitizeFailed, sanitizeFailedFree:
		if access {
			return errSanitizeFailed
		}
	}
	return nil
}

// inProgress is the sense data while an operation runs, with its progress (SPC-4 4.5.2.4.4).
func (s *sanitizeState) inProgress() *senseError {
	e := &senseError{key: NotReady, code: ascSanitizeInProgress}
	e.sks[0] = sksValid
	binary.BigEndian.PutUint16(e.sks[1:], uint16(min(s.progress.Load(), 0xffff)))
	return e
}

// sanitizeUsage is the usage map of all service actions.
func sanitizeUsage() []byte {
	return []byte{0, bitImmedSanitize | bitAUSE, 0, 0, 0, 0, 0, 0xff, 0xff, 0}
}

// prepareBlockErase is SANITIZE with BLOCK ERASE (SBC-4 5.30.3).
func prepareBlockErase(t *Task) error { return t.withoutParameters() }

// prepareCryptoErase is SANITIZE with CRYPTOGRAPHIC ERASE (SBC-4 5.30.4). See sanitizeRun.shred.
func prepareCryptoErase(t *Task) error { return t.withoutParameters() }

// prepareExitFailureMode is SANITIZE with EXIT FAILURE MODE (SBC-4 5.30.5).
func prepareExitFailureMode(t *Task) error { return t.withoutParameters() }

func (t *Task) withoutParameters() error {
	if binary.BigEndian.Uint16(t.CDB[7:]) != 0 {
		return invalidField(7, 7)
	}
	return nil
}

// prepareOverwrite is SANITIZE with OVERWRITE (SBC-4 5.30.2). The parameter list has a header and a
// pattern of at least one byte and at most a block.
func prepareOverwrite(t *Task) error {
	n := int64(binary.BigEndian.Uint16(t.CDB[7:]))
	if n <= overwriteHeaderLen || n > overwriteHeaderLen+int64(t.unit.blockSize()) {
		return invalidField(7, 7)
	}
	t.expect(n, true)
	return nil
}

func outOverwrite(t *Task, _ int64, p []byte) error {
	run, err := parseOverwrite(p, t.unit.blockSize())
	if err != nil {
		return err
	}
	return t.sanitize(run)
}

// parseOverwrite reads the parameter list of OVERWRITE (SBC-4 table 111).
func parseOverwrite(p []byte, blockSize int) (*sanitizeRun, error) {
	length := int(binary.BigEndian.Uint16(p[2:]))
	count := int(p[0] & overwriteCount)
	switch {
	case p[0]&overwriteTestMask != 0:
		return nil, invalidParameter(0, 6)
	case count == 0:
		return nil, invalidParameter(0, 4)
	case p[1] != 0:
		return nil, invalidParameter(1, 7)
	case length == 0 || length > blockSize:
		return nil, invalidParameter(2, 7)
	case length > len(p)-overwriteHeaderLen:
		return nil, errParameterLength
	}
	pattern := make([]byte, blockSize)
	for n := 0; n < blockSize; {
		n += copy(pattern[n:], p[overwriteHeaderLen:overwriteHeaderLen+length])
	}
	return &sanitizeRun{action: saOverwrite, passes: count, invert: p[0]&bitInvert != 0,
		pattern: pattern}, nil
}

func finishBlockErase(t *Task) (Status, error) { return t.sanitizeOnce(saBlockErase) }

func finishCryptoErase(t *Task) (Status, error) { return t.sanitizeOnce(saCryptoErase) }

func (t *Task) sanitizeOnce(action byte) (Status, error) {
	if err := t.sanitize(&sanitizeRun{action: action, passes: 1}); err != nil {
		return StatusCheckCondition, err
	}
	return StatusGood, nil
}

// finishExitFailureMode makes the medium usable again after a failed operation, if the initiator
// that started the operation allowed that.
func finishExitFailureMode(t *Task) (Status, error) {
	s := &t.unit.sanitizing
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := t.stillAdmitted(); err != nil {
		return StatusCheckCondition, err
	}
	switch sanitizePhase(s.phase.Load()) {
	case sanitizeFailed:
		return StatusCheckCondition, invalidField(1, 4)
	case sanitizeFailedFree:
		if err := t.unit.rememberSanitize(sanitizeNone, sanitizeFailedFree); err != nil {
			return StatusCheckCondition, err
		}
		s.phase.Store(uint32(sanitizeNone))
	}
	return StatusGood, nil
}

// sanitize starts the operation. It waits for the end unless the initiator set IMMED.
func (t *Task) sanitize(run *sanitizeRun) error {
	run.unit, run.free, run.done = t.unit, t.CDB[1]&bitAUSE != 0, make(chan struct{})
	if err := t.beginSanitize(run); err != nil {
		return err
	}
	if t.CDB[1]&bitImmedSanitize != 0 {
		return nil
	}
	<-run.done
	return run.err
}

func (t *Task) beginSanitize(run *sanitizeRun) error {
	// This needs no range yet. But a fence waits for held ranges, and so for a start under way.
	if err := t.lockRange(rangelock.Write, 0, 0); err != nil {
		return err
	}
	defer t.unit.Ranges.Unlock(&t.Hold)
	d, s := t.dev, &run.unit.sanitizing
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := t.stillAdmitted(); err != nil {
		return err
	}
	if s.running != nil {
		return s.inProgress()
	}
	if !run.unit.beginLonger(d) {
		return errStopped
	}
	if err := run.unit.rememberSanitize(failedPhase(run.free),
		sanitizePhase(s.phase.Load())); err != nil {
		run.unit.endLonger(d)
		return err
	}
	s.running = run
	s.progress.Store(0)
	s.phase.Store(uint32(sanitizeRunning))
	go func() {
		defer run.unit.endLonger(d)
		d.runSanitize(run)
	}()
	return nil
}

// runSanitize executes the operation and publishes its result. It holds the whole disk exclusively.
// So commands under way at the start end first, and a command that slipped in touches the medium
// only afterwards.
func (d *Device) runSanitize(run *sanitizeRun) {
	u := run.unit
	s := &u.sanitizing
	after, err := failedPhase(run.free), errPanicked
	defer func() {
		if p := recover(); p != nil {
			d.panicked(p)
		}
		if err == nil {
			err = u.rememberSanitize(sanitizeNone, after)
		}
		if err != nil {
			d.logFault(&Task{unit: u}, faultSanitize,
				"sanitizing a disk failed: its content is partly overwritten", err)
			run.err = errSanitizeFailed
		} else {
			after = sanitizeNone
		}
		s.mu.Lock()
		s.running = nil
		s.phase.Store(uint32(after))
		s.mu.Unlock()
		close(run.done)
	}()
	lun := zap.Uint16("lun", u.Number)
	d.log.Info("sanitizing a disk: its content is erased", lun, zap.Int("passes", run.passes))
	var h rangelock.Hold
	run.task = &Task{Request: serving.Request{Context: u.ctx}, unit: u}
	run.size = int64(u.blocks()) << u.shift
	h.Set(rangelock.Exclusive, "", 0, run.size)
	u.Ranges.Lock(&h)
	defer u.Ranges.Unlock(&h)
	if err = run.carryOut(u.ctx); err == nil {
		d.log.Info("the disk is sanitized", lun)
	}
}
