package scsi

import (
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/internal/rangelock"
)

// Task is one SCSI command on its way through the device server. The transport owns it and uses it
// again after Reset. Its methods are not for concurrent use.
type Task struct {
	// Set by the transport before Prepare.

	Nexus   *Nexus
	LUN     uint64   // the 8-byte LUN structure
	CDB     [16]byte // the first bytes of a longer one, of which no command is known
	Offered int64    // bytes that the initiator means to send

	// Executor is who calls In, Out or Finish next; nil: the command may be held for ever.
	Executor Executor

	// Set by Prepare.

	Dir    Direction
	Length int64 // bytes that the CDB asks to transfer; of parameter data, what exists of it
	Gather bool  // Out wants all Length bytes in one call

	// Set by Device.Address, and never changed until Reset.

	dev  *Device
	unit *unit      // nil: no logical unit
	at   *nexusUnit // nil: no logical unit

	cmd   *command
	lba   uint64
	count uint64 // logical blocks
	fua   bool
	// flushes is the flush that a MODE SELECT has to wait for (see modeState); 0: none.
	flushes uint64
	moved   int64 // bytes that In or Out has handled
	data    []byte
	hold    rangelock.Hold

	aborted atomic.Bool

	// Of a command that uses a distant disk; see distant.go.

	waited bool
	since  time.Time                          // it began to wait; zero: it has not, or content came
	cancel atomic.Pointer[context.CancelFunc] // ends the wait under way; nil: there is none
}

var errPastEnd = errors.New("transport moved data that the command does not have")

// Address finds the logical unit that the command is for, by Nexus and LUN: it is settled then,
// whatever happens to that number later. A transport of which other goroutines look for commands
// calls it with the lock held under which they do.
func (d *Device) Address(t *Task) {
	t.dev = d
	if u := d.unit(t.LUN); u != nil {
		if at := t.Nexus.at(u); at != nil { // else the unit was removed a moment ago
			t.unit, t.at = u, at
		}
	}
}

// For reports whether the command is for the logical unit that this 8-byte LUN addresses now.
func (t *Task) For(lun uint64) bool {
	u := t.dev.unit(lun)
	return t.unit == u && (u != nil || t.LUN == lun)
}

// Removed reports whether the logical unit that the command was for is removed.
func (t *Task) Removed() bool { return t.unit != nil && t.unit.removed() }

// What the transport says besides of logical units that come and go.
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
	cmd, cdbErr := u.table.lookup(&t.CDB)
	if t.at.stranger.Load() && (cmd == nil || cmd.flags&duringAttention == 0) {
		return errLUNNotSupported
	}
	// SAM-5 5.14.1: a pending unit attention comes before anything else is said about the command.
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
	if cmd.flags&duringSanitize == 0 {
		if err := u.sanitizing.ready(cmd.flags&(usesMedium|needsMedium) != 0 &&
			cmd.flags&sanitizes == 0); err != nil {
			return err
		}
	}
	if err := cmd.check(&t.CDB); err != nil {
		return err
	}
	if cmd.flags&(usesMedium|needsMedium) != 0 && u.ejected.Load() {
		return errMediumNotPresent
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
		return errLUNNotSupported
	}
	t.cmd = cmd
	if err := cmd.check(&t.CDB); err != nil {
		return err
	}
	return cmd.prepare(t)
}

// writable tells why a unit refuses writes, or nil.
func (u *unit) writable() error {
	switch {
	case u.protected.Load():
		return errWriteProtected
	case u.mode.softwareProtected():
		return errSoftwareProtected
	}
	return nil
}

// check refuses a CDB with a bit that the command does not use, which covers reserved bits,
// features that we do not have and the NACA bit of the control byte.
func (c *command) check(cdb *[16]byte) error {
	if (binary.BigEndian.Uint64(cdb[:8])&^c.mask[0])|
		(binary.BigEndian.Uint64(cdb[8:])&^c.mask[1]) == 0 {
		return nil
	}
	for i, m := range c.usage {
		if extra := cdb[i] &^ m; extra != 0 && i > 0 {
			return invalidField(i, bits.Len8(extra)-1)
		}
	}
	return nil
}

// In fills p with the command's data from byte off. Calls ascend; p ends at Length at the latest.
// The disk's errors are returned as they are, for Outcome.
func (t *Task) In(off int64, p []byte) error {
	if t.Dir != DirIn || off < 0 || off+int64(len(p)) > t.Length {
		return errPastEnd
	}
	if t.cmd.in == nil { // the answer is there, and no disk is asked
		t.moved = off + int64(len(p))
		copy(p, t.data[off:])
		return nil
	}
	if err := t.begin(true); err != nil {
		return err
	}
	defer t.unit.end() // also where the disk panics
	t.moved = off + int64(len(p))
	return t.cmd.in(t, off, p)
}

// Out takes the data that the initiator sent, from byte off. Calls ascend and do not overlap; each
// ends at a block but the last. What the initiator did not send, because it expected a shorter
// transfer, never comes; so the last may end within a block.
func (t *Task) Out(off int64, p []byte) error {
	if t.Dir != DirOut || off < 0 || off+int64(len(p)) > t.Length {
		return errPastEnd
	}
	if err := t.begin(true); err != nil {
		return err
	}
	defer t.unit.end() // also where the disk panics
	t.moved = off + int64(len(p))
	if t.Gather && t.moved < t.Length {
		return errShortTransfer
	}
	return t.cmd.out(t, off, p)
}

// Finish executes what remains once the data has moved, and returns the status. It may wait for the
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
	defer t.unit.end() // also where the disk panics
	return t.cmd.finish(t)
}

// begin comes before everything that uses the disk or its store, and keeps them until unit.end.
// Before the first access to the medium it sees to it that whoever has claimed the unit is
// remembered, and asks whether the command may still go on. After an error nothing is kept.
func (t *Task) begin(first bool) error {
	if !t.unit.begin() {
		return errLUNNotSupported
	}
	if t.unit.far != nil {
		t.since = time.Time{}
	}
	if !first || t.cmd.flags&usesMedium == 0 {
		return nil
	}
	t.dev.keepOwner(t.unit)
	if err := t.overtaken(); err != nil {
		t.unit.end()
		return err
	}
	return nil
}

// overtaken tells that a sanitize operation has begun since the command was validated, as while it
// waited for data.
func (t *Task) overtaken() error {
	if t.cmd.flags&sanitizes != 0 {
		return nil
	}
	return t.unit.sanitizing.ready(true)
}

// maxKeptData is the capacity of parameter data that a task keeps when it is used again: that of
// usual ones. An initiator can have each of its open commands keep so much. Bytes.
const maxKeptData = 256

// Reset makes the task ready for another command.
func (t *Task) Reset() {
	data := t.data[:0]
	if cap(data) > maxKeptData {
		data = nil
	}
	*t = Task{data: data}
}

// Abort tells a command that executes that nobody wants its result any more: a long one stops at
// the next step. Any goroutine may call it, until Reset.
func (t *Task) Abort() {
	t.aborted.Store(true)
	if cancel := t.cancel.Load(); cancel != nil {
		(*cancel)()
	}
}

// errAborted ends a command that was aborted; nobody is told.
var errAborted = &senseError{key: AbortedCommand, code: ascNone}

// wanted is an error once the command is aborted, or its unit removed. What takes many disk calls
// asks before each.
func (t *Task) wanted() error {
	if t.aborted.Load() {
		return errAborted
	}
	if t.unit.removed() {
		return errLUNNotSupported
	}
	return nil
}

// lockRange holds a range of the medium for what the command does to it; the caller unlocks t.hold.
// After an error nothing is held: see lockHold.
func (t *Task) lockRange(mode rangelock.Mode, off, length int64) error {
	t.hold.Set(mode, t.Nexus.initiator.name, off, length)
	return t.lockHold()
}

// lockHold waits for the ranges that t.hold has. It fails once the command is aborted: whoever has
// ended it may have been told so, and have written the same blocks since. So nothing that changes
// the medium may look before it holds what it changes. Nor may it write what the next start would
// undo.
func (t *Task) lockHold() error {
	u := t.unit
	for {
		if err := u.settleAtomic(); err != nil {
			return err
		}
		if err := t.lock(); err != nil {
			return err
		}
		err := t.wanted()
		if err == nil && !u.atomicKept.Load() {
			return nil
		}
		u.ranges.Unlock(&t.hold)
		if err != nil {
			return err
		}
	}
}

// LUNNumber is the number of the logical unit that the command was sent to; false if no disk is
// there.
func (t *Task) LUNNumber() (uint16, bool) {
	if t.unit == nil {
		return 0, false
	}
	return t.unit.number, true
}

// Host is what the transport keeps with the logical unit that the command is for; nil where there
// is none.
func (t *Task) Host() any {
	if t.unit == nil {
		return nil
	}
	return t.unit.host
}

// Op classifies the command; OpOther before Prepare.
func (t *Task) Op() Operation {
	if t.cmd == nil {
		return OpOther
	}
	return t.cmd.op
}

// Name is the command's name in its standard, or the operation code where it is unknown; for logs.
func (t *Task) Name() string {
	if t.cmd == nil {
		return unknownName(t.CDB[0])
	}
	return t.cmd.name
}

// reply makes the parameter data in t.data the result, limited by the allocation length.
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

// exactly refuses a command for which the initiator means to send more than the CDB asks for: 256
// blocks in a field of one byte, or a buffer that is not one block. field is the CDB's length
// field, which libiscsi's suite wants to see blamed. Less than that is refused where the command
// ends.
func (t *Task) exactly(field int) error {
	if t.Offered > t.Length {
		return invalidField(field, 7)
	}
	return nil
}

// Slow reports whether the READ is worth another processor, as the disk estimates it.
func (t *Task) Slow() bool {
	if t.unit == nil || t.unit.estimate == nil || t.cmd == nil || t.cmd.op != OpRead ||
		t.Dir != DirIn || !t.unit.begin() {
		return false
	}
	defer t.unit.end()
	return t.unit.estimate.Slow(t.off() + t.moved)
}

// off and length are the medium range of the command in bytes.
func (t *Task) off() int64    { return int64(t.lba) << blockShift }
func (t *Task) length() int64 { return int64(t.count) << blockShift }

// scratchSize is the size of the buffers for data that a command needs besides the initiator's.
// Bytes.
const scratchSize = 256 << 10

var scratch = sync.Pool{New: func() any { return new([scratchSize]byte) }}
