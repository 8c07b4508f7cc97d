package scsi

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/serving"
)

// Limits of WRITE ATOMIC in bytes; VPD page B0h reports blocks. Writes cover whole physical blocks
// and fit one buffer.
const (
	maxAtomic         = 128 << 10
	atomicGranularity = granularity
)

// prepareWriteAtomic is WRITE ATOMIC(16) (SBC-4 5.48). The whole write is one atomic operation,
// without an atomic boundary. FUA changes nothing, because an atomic write is always flushed.
func prepareWriteAtomic(t *Task) error {
	t.lba, t.count = lba16(&t.CDB), uint64(binary.BigEndian.Uint16(t.CDB[12:]))
	if err := t.inRange(); err != nil {
		return err
	}
	switch {
	case t.off()%atomicGranularity != 0:
		return invalidField(2, 7)
	case t.length() > maxAtomic, t.length()%atomicGranularity != 0:
		return invalidField(12, 7)
	}
	t.expect(t.length(), true)
	return t.exactly(12)
}

// atomicRecord is the length of the header of the undo record, which is stored during a WRITE
// ATOMIC. The header is the offset of the blocks in bytes. Their former content follows.
const atomicRecord = 8

// outWriteAtomic writes all blocks or none (SBC-4 4.29). It holds the range exclusively, so that no
// other command sees a part of the write.
//
// The store keeps the former content until the new blocks are as durable as the disk makes them.
// The former content is put back when the disk fails in the middle, or at the next start if the
// target was killed or lost power. Then the record is deleted, even if the disk refuses to take the
// content back or to flush: the next start would undo later writes. It stays only for a disk that
// has failed for good, because nothing can be written there until the next start.
func outWriteAtomic(t *Task, _ int64, p []byte) error {
	u := t.unit
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	record := buf[:atomicRecord+len(p)]
	before := record[atomicRecord:]
	t.Hold.Set(rangelock.Exclusive, t.Nexus.Name(), t.off(), t.length())
	if err := t.Lock(t.unit.served); err != nil {
		return err
	}
	defer u.Ranges.Unlock(&t.Hold)
	if _, err := t.ReadAt(u.served, before, t.off()); err != nil {
		return err
	}
	u.atomics.Lock() // not earlier: the read may wait for far content
	defer u.atomics.Unlock()
	if err := t.stillWanted(); err != nil { // see Task.lockHold; an old record is replaced below
		return err
	}
	binary.BigEndian.PutUint64(record, uint64(t.off()))
	kept := true // or may be, even if the disk panics
	defer func() { u.atomicKept.Store(kept) }()
	if err := u.Store.Save(storedAtomic, record); err != nil {
		return fmt.Errorf("keep what an atomic write replaces: %w", err)
	}
	err := t.replace(p, before)
	if errors.Is(err, disk.ErrFailed) {
		kept = false // the disk takes no writes, so none has to wait for forgetAtomic
		return err
	}
	forget := u.forgetAtomic()
	kept = forget != nil
	return errors.Join(err, forget)
}

// replace writes p and makes it durable. If that fails, it puts the former content back.
func (t *Task) replace(p, before []byte) error {
	u, off := t.unit, t.off()
	n, err := t.WriteAt(u.served, p, off)
	if err == nil {
		err = u.Disk.Flush()
	}
	if err == nil || errors.Is(err, disk.ErrFailed) {
		return err
	}
	if serving.NotHeld(err) { // only these blocks were changed, and they are at hand
		const step = atomicGranularity
		before = before[:min((n+step-1)/step*step, len(before))]
	}
	if undo := u.putBack(before, off); undo != nil {
		undo = fmt.Errorf("the blocks that the atomic write has changed are lost: %w", undo)
		if serving.NotHeld(err) { // the initiator must not simply try again
			err = nil
		}
		err = errors.Join(err, undo)
	}
	return errors.Join(err, u.Disk.Flush())
}

// errAtomicKept ends a command because an undo record is still there and could not be deleted.
var errAtomicKept = errors.New("what an atomic write has replaced is still kept")

// settleAtomic deletes a record that a WRITE ATOMIC could not delete. Nothing may be written
// before: the next start would overwrite it with the former blocks. The caller holds no range.
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

// putBack writes the former content. If there is no space for all of it, former holes become holes
// again.
func (u *unit) putBack(before []byte, off int64) error {
	_, err := u.Disk.WriteAt(context.Background(), before, off)
	if err == nil || u.Discards == nil {
		return err
	}
	for len(before) > 0 {
		n := min(atomicGranularity, len(before))
		block := before[:n]
		if slices.ContainsFunc(block, func(b byte) bool { return b != 0 }) {
			_, err = u.Disk.WriteAt(context.Background(), block, off)
		} else {
			err = u.Discards.Discard(context.Background(), off, int64(n))
		}
		if err != nil {
			return err
		}
		before, off = before[n:], off+int64(n)
	}
	return nil
}

// undoAtomic puts back the content that an interrupted WRITE ATOMIC has replaced.
func (u *unit) undoAtomic() error {
	if u.Store == nil {
		return nil
	}
	record, err := u.Store.Load(storedAtomic)
	if err != nil {
		return fmt.Errorf("load %s: %w", storedAtomic, err)
	}
	if len(record) == 0 {
		return nil
	}
	if len(record) <= atomicRecord || (len(record)-atomicRecord)%u.blockSize() != 0 {
		return fmt.Errorf("what is kept as %s cannot be read: it has %d bytes; remove %s if the "+
			"content of the disk is known to be good",
			storedAtomic, len(record), u.Store.Where(storedAtomic))
	}
	off, before := binary.BigEndian.Uint64(record), record[atomicRecord:]
	if size := uint64(u.Disk.Size()); off > size || uint64(len(before)) > size-off {
		return fmt.Errorf("what is kept as %s is of another disk: it ends at byte %d of %d; "+
			"remove %s", storedAtomic, off+uint64(len(before)), size, u.Store.Where(storedAtomic))
	}
	// The volume may be full, and only a guest of this disk can make room.
	if err = u.putBack(before, int64(off)); err == nil {
		err = u.Disk.Flush()
	}
	if err == nil {
		err = u.Store.Save(storedAtomic, nil)
	}
	if err != nil {
		return fmt.Errorf("put back what an interrupted atomic write has replaced: %w", err)
	}
	return nil
}

// forgetAtomic deletes the undo record: the WRITE ATOMIC has ended, or its former content must not
// be put back any more.
func (u *unit) forgetAtomic() error {
	if u.Store == nil {
		return nil
	}
	if err := u.Store.Save(storedAtomic, nil); err != nil {
		return fmt.Errorf("forget what an atomic write has replaced: %w", err)
	}
	return nil
}
