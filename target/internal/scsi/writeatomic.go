package scsi

import (
	"encoding/binary"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
)

// Limits of WRITE ATOMIC that VPD page B0h reports, in logical blocks: whole physical blocks, and
// no more than one buffer.
const (
	maxAtomic         = 256
	atomicGranularity = granularity
)

// prepareWriteAtomic is WRITE ATOMIC(16) (SBC-4 5.48). There is no atomic boundary: the write is
// one. FUA changes nothing, as an atomic write is always flushed.
func prepareWriteAtomic(t *Task) error {
	t.lba, t.count = lba16(&t.CDB), uint64(binary.BigEndian.Uint16(t.CDB[12:]))
	if err := t.inRange(); err != nil {
		return err
	}
	switch {
	case t.lba%atomicGranularity != 0:
		return invalidField(2, 7)
	case t.count > maxAtomic, t.count%atomicGranularity != 0:
		return invalidField(12, 7)
	}
	t.expect(t.length(), true)
	return t.exactly(12)
}

// atomicRecord is the header of what is kept while a WRITE ATOMIC is under way: the offset of the
// blocks in bytes. Their former content follows.
const atomicRecord = 8

// outWriteAtomic writes all blocks or none (SBC-4 4.29). The range is held exclusively, so that no
// other command sees a part of it. What was there is kept in the store until the new blocks are as
// durable as the disk makes them: it is put back when the disk fails in the middle, or at the next
// start when the target was killed or lost power. It is not kept any longer, even where the disk
// refuses to take it back or to flush: that start would undo what was written in between. Only on a
// disk that has failed for good it stays, as nothing can be written until then.
func outWriteAtomic(t *Task, _ int64, p []byte) error {
	u := t.unit
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	record := buf[:atomicRecord+len(p)]
	before := record[atomicRecord:]
	t.hold.Set(rangelock.Exclusive, t.Nexus.initiator.name, t.off(), t.length())
	if err := t.lock(); err != nil {
		return err
	}
	defer u.ranges.Unlock(&t.hold)
	if _, err := t.readAt(u, before, t.off()); err != nil {
		return err
	}
	u.atomics.Lock() // not before: the content may lie far away
	defer u.atomics.Unlock()
	if err := t.wanted(); err != nil { // see Task.lockHold; what was kept is replaced here
		return err
	}
	binary.BigEndian.PutUint64(record, uint64(t.off()))
	kept := true // perhaps; also where the disk panics
	defer func() { u.atomicKept.Store(kept) }()
	if err := u.store.Save(storedAtomic, record); err != nil {
		return fmt.Errorf("keep what an atomic write replaces: %w", err)
	}
	err := t.replace(p, before)
	if errors.Is(err, disk.ErrFailed) {
		kept = false // nothing is written that would have to wait until it is forgotten
		return err
	}
	forget := u.forgetAtomic()
	kept = forget != nil
	return errors.Join(err, forget)
}

// replace writes p and makes it durable, or else puts back what was there before.
func (t *Task) replace(p, before []byte) error {
	u, off := t.unit, t.off()
	n, err := t.writeAt(u, p, off)
	if err == nil {
		err = u.disk.Flush()
	}
	if err == nil || errors.Is(err, disk.ErrFailed) {
		return err
	}
	if notHeld(err) { // no other blocks were changed, and these are at hand
		const step = atomicGranularity * BlockSize
		before = before[:min((n+step-1)/step*step, len(before))]
	}
	if undo := u.putBack(before, off); undo != nil {
		undo = fmt.Errorf("the blocks that the atomic write has changed are lost: %w", undo)
		if notHeld(err) { // to try it again is no answer to that
			err = nil
		}
		err = errors.Join(err, undo)
	}
	return errors.Join(err, u.disk.Flush())
}

// errAtomicKept ends what has met a record that has to go and cannot wait for that.
var errAtomicKept = errors.New("what an atomic write has replaced is still kept")

// settleAtomic forgets what a WRITE ATOMIC has kept and could not forget. Until that is done
// nothing is written: the next start would put former blocks back over it. The caller holds no
// range.
func (u *unit) settleAtomic() error {
	if !u.atomicKept.Load() {
		return nil
	}
	u.atomics.Lock()
	defer u.atomics.Unlock()
	err := u.forgetAtomic()
	u.atomicKept.Store(err != nil)
	return err
}

// putBack writes what was there before. Where there is no space for all of it, what was a hole
// becomes one again.
func (u *unit) putBack(before []byte, off int64) error {
	_, err := u.disk.WriteAt(before, off)
	if err == nil || u.discards == nil {
		return err
	}
	const step = atomicGranularity * BlockSize
	for ; len(before) > 0; before, off = before[step:], off+step {
		block := before[:step]
		if [step]byte(block) == ([step]byte{}) {
			err = u.discards.Discard(off, step)
		} else {
			_, err = u.disk.WriteAt(block, off)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// undoAtomic puts back what a WRITE ATOMIC that did not end has replaced.
func (u *unit) undoAtomic() error {
	if u.store == nil {
		return nil
	}
	record, err := u.store.Load(storedAtomic)
	if err != nil {
		return fmt.Errorf("load %s: %w", storedAtomic, err)
	}
	if len(record) == 0 {
		return nil
	}
	if len(record) <= atomicRecord || (len(record)-atomicRecord)%BlockSize != 0 {
		return fmt.Errorf("what is kept as %s cannot be read: it has %d bytes; remove %s if the "+
			"content of the disk is known to be good",
			storedAtomic, len(record), u.store.Where(storedAtomic))
	}
	off, before := binary.BigEndian.Uint64(record), record[atomicRecord:]
	if size := uint64(u.disk.Size()); off > size || uint64(len(before)) > size-off {
		return fmt.Errorf("what is kept as %s is of another disk: it ends at byte %d of %d; "+
			"remove %s", storedAtomic, off+uint64(len(before)), size,
			u.store.Where(storedAtomic))
	}
	if _, err = u.disk.WriteAt(before, int64(off)); err == nil {
		err = u.disk.Flush()
	}
	if err == nil {
		err = u.store.Save(storedAtomic, nil)
	}
	if err != nil {
		return fmt.Errorf("put back what an interrupted atomic write has replaced: %w", err)
	}
	return nil
}

// forgetAtomic gives up what a WRITE ATOMIC has kept: it has ended, or what it would put back must
// never be seen again.
func (u *unit) forgetAtomic() error {
	if u.store == nil {
		return nil
	}
	if err := u.store.Save(storedAtomic, nil); err != nil {
		return fmt.Errorf("forget what an atomic write has replaced: %w", err)
	}
	return nil
}
