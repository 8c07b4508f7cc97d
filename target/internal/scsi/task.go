package scsi

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"slices"
	"sync"

	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/serving"
)

// Task is one SCSI command in the device server. The transport owns it and reuses it after Reset.
// Its methods are not for concurrent use, unless they say so.
type Task struct {
	// Set by the transport before Prepare.

	Nexus   *Nexus
	LUN     uint64   // the 8-byte LUN structure
	CDB     [16]byte // the first bytes of a longer CDB; no known command has one
	Offered int64    // bytes that the initiator means to send

	// The Executor is the goroutine that calls In, Out or Finish next. Hold are ranges of the
	// medium.
	serving.Request

	// Set by Prepare.

	Dir    Direction
	Length int64 // bytes to transfer; for parameter data, at most the existing bytes
	Gather bool  // Out wants all Length bytes in one call

	// Set by Device.Address, and never changed until Reset.

	dev  *Device
	unit *unit      // nil: no logical unit
	at   *nexusUnit // nil: no logical unit

	cmd   *command
	lba   uint64
	count uint64 // logical blocks
	fua   bool
	// flushes is the number of the flush that a MODE SELECT has to wait for (see modeState), or 0.
	flushes uint64
	moved   int64 // bytes that In or Out has processed
	data    []byte
}

var errPastEnd = errors.New("transport moved data that the command does not have")

// Address finds the logical unit of the command by Nexus and LUN. The command then keeps that unit,
// even if the number changes hands. If other goroutines of the transport look for commands under a
// lock, the transport must hold that lock when it calls Address.
func (d *Device) Address(t *Task) {
	t.dev = d
	if u := d.unit(t.LUN); u != nil {
		if at := t.Nexus.at(u); at != nil { // else the unit was removed a moment ago
			t.unit, t.at = u, at
		}
	}
}

// For reports whether the command is for the logical unit that has this 8-byte LUN now.
func (t *Task) For(lun uint64) bool {
	u := t.dev.unit(lun)
	return t.unit == u && (u != nil || t.LUN == lun)
}

// Removed reports whether the command's logical unit has been removed.
func (t *Task) Removed() bool { return t.unit != nil && t.unit.Removed() }

// Errors that the transport itself reports when logical units come and go.
var (
	ErrRemoved     error = errLUNNotSupported // ends a command whose logical unit is removed
	ErrLUNsChanged error = &senseError{key: UnitAttention, code: ascLUNsChanged}
)

// Prepare validates the command completely and fills in Dir, Length and Gather. It never waits for
// a disk. After an error the command is over.
func (d *Device) Prepare(t *Task) error {
	if t.dev == nil {
		d.Address(t)
	}
	u := t.unit
	if u == nil {
		return d.prepareWithoutUnit(t)
	}
	cmd, cdbErr := u.table().lookup(&t.CDB)
	if t.at.unprobed.Load() && (cmd == nil || cmd.flags&duringAttention == 0) {
		return errLUNNotSupported
	}
	// SAM-5 5.14.1: a pending unit attention is reported before any fault of the command.
	if t.at.pending.Load() != 0 && (cmd == nil || cmd.flags&duringAttention == 0) {
		if sense := t.at.take(); sense != nil {
			return sense
		}
	}
	if cmd == nil {
		return cdbErr
	}
	t.cmd = cmd
	if d.conflicts(t.at, t.Nexus, cmd.flags) && d.conflicts(t.at, t.Nexus, cmd.rights(&t.CDB)) {
		return errConflict
	}
	if err := cmd.check(&t.CDB); err != nil {
		return err
	}
	if cmd.flags&writesMedium != 0 {
		if err := u.writable(); err != nil {
			return err
		}
	}
	if cmd.prepare != nil {
		if err := cmd.prepare(t); err != nil {
			return err
		}
	}
	if cmd.flags&usesMedium != 0 && !d.claim(t.at, t.Nexus) {
		return errConflict
	}
	return nil
}

// prepareWithoutUnit answers for a LUN that has no disk (SAM-5 4.7.1, SPC-4 6.6.2).
func (d *Device) prepareWithoutUnit(t *Task) error {
	cmd, err := d.orphans.lookup(&t.CDB)
	if err != nil || cmd.opcode == opReportLUNs && t.LUN != 0 {
		d.logMissingLUN(t)
		return errLUNNotSupported
	}
	t.cmd = cmd
	if err := cmd.check(&t.CDB); err != nil {
		return err
	}
	return cmd.prepare(t)
}

// writable returns why a unit refuses writes, or nil.
func (u *unit) writable() error {
	switch {
	case u.Protected():
		return errWriteProtected
	case u.mode.softwareProtected():
		return errSoftwareProtected
	}
	return nil
}

// check refuses a CDB with a bit that the command does not use: a reserved bit, an unsupported
// feature or the NACA bit of the control byte.
func (c *command) check(cdb *[16]byte) error {
	if (binary.BigEndian.Uint64(cdb[:8])&^c.mask[0])|
		(binary.BigEndian.Uint64(cdb[8:])&^c.mask[1]) == 0 {
		return nil
	}
	for i, m := range c.usage {
		if i == 1 {
			m |= c.ignore
		}
		if extra := cdb[i] &^ m; extra != 0 && i > 0 {
			return invalidField(i, bits.Len8(extra)-1)
		}
	}
	return nil
}

// In fills p with the command's data from byte off. Calls come in ascending order, and p ends at
// Length at the latest. It returns the disk's errors as they are, for Outcome.
func (t *Task) In(off int64, p []byte) error {
	if t.Dir != DirIn || off < 0 || off+int64(len(p)) > t.Length {
		return errPastEnd
	}
	if t.cmd.in == nil { // Prepare has made the answer, without the disk
		t.moved = off + int64(len(p))
		copy(p, t.data[off:])
		return nil
	}
	if err := t.begin(true); err != nil {
		return err
	}
	defer t.unit.End() // even if the disk panics
	t.moved = off + int64(len(p))
	return t.cmd.in(t, off, p)
}

// Out processes the initiator's data from byte off. Calls come in ascending order and do not
// overlap. Each ends at a block boundary except the last: if the initiator expected a shorter
// transfer, its data may end within a block.
func (t *Task) Out(off int64, p []byte) error {
	if t.Dir != DirOut || off < 0 || off+int64(len(p)) > t.Length {
		return errPastEnd
	}
	if err := t.begin(true); err != nil {
		return err
	}
	defer t.unit.End() // even if the disk panics
	t.moved = off + int64(len(p))
	if t.Gather && t.moved < t.Length {
		return errShortTransfer
	}
	return t.cmd.out(t, off, p)
}

// Finish does what is left after the data has moved, and returns the status. It may wait for the
// disk.
func (t *Task) Finish() (Status, error) {
	if t.Gather && t.moved < t.Length {
		return StatusCheckCondition, errShortTransfer
	}
	if t.cmd.finish == nil {
		return StatusGood, nil
	}
	if err := t.begin(t.moved == 0); err != nil { // else the medium has been accessed already
		return StatusCheckCondition, err
	}
	defer t.unit.End() // even if the disk panics
	return t.cmd.finish(t)
}

// begin comes before every use of the disk or its store, and keeps them until unit.End. Before the
// first access to the medium it stores the owner of the unit. After an error it keeps nothing.
func (t *Task) begin(first bool) error {
	if !t.unit.Begin() {
		return errLUNNotSupported
	}
	t.Moved(t.unit.served)
	if !first || t.cmd.flags&usesMedium == 0 {
		return nil
	}
	t.dev.disks.KeepOwner(t.unit.served)
	return nil
}

// maxKeptData is how much memory for parameter data a task keeps for its next command, in bytes. It
// is enough for usual commands. An initiator can make each of its open commands keep that much.
const maxKeptData = 256

// Reset makes the task ready for another command.
func (t *Task) Reset() {
	data := t.data[:0]
	if cap(data) > maxKeptData {
		data = nil
	}
	*t = Task{data: data}
}

// stillWanted returns an error once the command is aborted or its unit removed. Code with many disk
// calls calls it before each of them.
func (t *Task) stillWanted() error { return t.Wanted(t.unit.served) }

// lockRange holds a range of the medium for the command; the caller unlocks t.Hold. After an error
// nothing is held (see lockHold).
func (t *Task) lockRange(mode rangelock.Mode, off, length int64) error {
	t.Hold.Set(mode, t.Nexus.Name(), off, length)
	return t.lockHold()
}

// lockHold waits for the ranges in t.Hold. It fails once the command is aborted: another initiator
// may know of the abort, and have written the same blocks since. So a command that changes the
// medium may read it only after lockHold. Nor may a command write data that the next start would
// undo, so lockHold settles a kept atomic record first.
func (t *Task) lockHold() error {
	u := t.unit
	for {
		if err := u.settleAtomic(); err != nil {
			return err
		}
		if err := t.Lock(t.unit.served); err != nil {
			return err
		}
		err := t.stillWanted()
		if err == nil && !u.atomicKept.Load() {
			return nil
		}
		u.Ranges.Unlock(&t.Hold)
		if err != nil {
			return err
		}
	}
}

// LUNNumber returns the number of the command's logical unit; false if no disk is there.
func (t *Task) LUNNumber() (uint16, bool) {
	if t.unit == nil {
		return 0, false
	}
	return t.unit.Number, true
}

// Disk is the command's logical unit; nil if there is none.
func (t *Task) Disk() *serving.Disk {
	if t.unit == nil {
		return nil
	}
	return t.unit.served
}

// Op classifies the command; serving.OpOther before Prepare.
func (t *Task) Op() serving.Operation {
	if t.cmd == nil {
		return serving.OpOther
	}
	return t.cmd.op
}

// reply makes t.data the answer, cut to the allocation length.
func (t *Task) reply(allocation uint32) {
	t.data = t.data[:min(int64(len(t.data)), int64(allocation))]
	t.Length = int64(len(t.data))
	if t.Length > 0 {
		t.Dir = DirIn
	}
}

// expect asks for n bytes of data from the initiator.
func (t *Task) expect(n int64, gather bool) {
	if n > 0 {
		t.Dir, t.Length, t.Gather = DirOut, n, gather
	}
}

// exactly refuses a command if the initiator wants to send more than the CDB asks for, such as 256
// blocks in a field of one byte, or a buffer that is not one block. The error points to field, the
// CDB's length field, because libiscsi's suite expects that. If the initiator sends too little, the
// command is refused at its end.
func (t *Task) exactly(field int) error {
	if t.Offered > t.Length {
		return invalidField(field, 7)
	}
	return nil
}

// Slow reports whether the READ is worth another processor, by the disk's estimate.
func (t *Task) Slow() bool {
	if t.unit == nil || t.unit.Estimate == nil || t.cmd == nil || t.cmd.op != serving.OpRead ||
		t.Dir != DirIn || !t.unit.Begin() {
		return false
	}
	defer t.unit.End()
	return t.unit.Estimate.Slow(t.off() + t.moved)
}

// off and length are the medium range of the command in bytes.
func (t *Task) off() int64    { return int64(t.lba) << t.unit.shift }
func (t *Task) length() int64 { return int64(t.count) << t.unit.shift }

// scratchSize is the size in bytes of buffers that commands need in addition to the initiator's
// data.
const scratchSize = 256 << 10

var scratch = sync.Pool{New: func() any { return new([scratchSize]byte) }}

// Worked notes that the command has succeeded.
func (t *Task) Worked() {
	if t.unit != nil && t.cmd != nil {
		t.unit.Worked(t.cmd.op, t.cmd.name)
	}
}

// abortPreempted ends the commands of nexuses whose registrations a PREEMPT AND ABORT removed
// (SPC-4 5.13.11.5).
func (d *Device) abortPreempted(t *Task, removed []InitiatorPort) {
	d.mu.Lock()
	var nexuses []*Nexus
	for n := range d.nexuses {
		if at := n.at(t.unit); at != nil && slices.Contains(removed, n.port) {
			nexuses = append(nexuses, n)
		}
	}
	d.mu.Unlock()
	d.abort(t.unit, nexuses, t)
	// A command that was aborted before it holds its range changes nothing once it gets the range
	// (see Task.lockRange). Sessions that have ended may have left writes in a slow disk. So this
	// waits for writes by initiator name, not by nexus.
	t.unit.Ranges.Drain(func(name string) bool {
		return slices.ContainsFunc(removed, func(p InitiatorPort) bool { return p.Name == name })
	})
}

// abort ends the commands of nexuses at a unit, except one. Their new commands must be refused
// already when abort is called.
func (d *Device) abort(u *unit, nexuses []*Nexus, except *Task) {
	if d.opt.Abort != nil && len(nexuses) > 0 {
		d.opt.Abort(nexuses, func(t *Task) bool { return t.unit == u && t != except })
	}
}
