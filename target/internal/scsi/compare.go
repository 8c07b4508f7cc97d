package scsi

import (
	"context"

	"kubevirt.io/disk/internal/rangelock"

	"kubevirt.io/disk/serving"
)

// prepareCompareAndWrite is COMPARE AND WRITE (SBC-3 5.2). The data are the blocks to compare, then
// the same number of blocks to write.
func prepareCompareAndWrite(t *Task) error {
	t.lba = lba16(&t.CDB)
	t.count = uint64(t.CDB[13])
	if err := t.inRange(); err != nil {
		return err
	}
	if t.length() > maxCompareAndWrite {
		return invalidField(13, 7)
	}
	t.fua = t.CDB[1]&bitFUA != 0
	t.expect(2*t.length(), true)
	return t.exactly(13)
}

// outCompareAndWrite holds the range exclusively, so that no other command sees or changes anything
// between the comparison and the write.
func outCompareAndWrite(t *Task, _ int64, p []byte) error {
	u := t.unit
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	medium := buf[:t.length()]
	if err := t.lockRange(rangelock.Exclusive, t.off(), t.length()); err != nil {
		return err
	}
	defer u.Ranges.Unlock(&t.Hold)
	if _, err := t.ReadAt(u.served, medium, t.off()); err != nil {
		return err
	}
	if err := differs(p[:len(medium)], medium, 0); err != nil {
		return err
	}
	return t.replaceCompared(p[len(medium):], medium)
}

// replaceCompared stores the blocks after a successful comparison. If content cannot be had in
// time, it undoes a partial write. Otherwise the initiator, which sends the command again, would
// find its own blocks and take them for another initiator's.
func (t *Task) replaceCompared(p, medium []byte) error {
	n, err := t.WriteAt(t.unit.served, p, t.off())
	if n > 0 && serving.NotHeld(err) {
		if _, undo := t.unit.Disk.WriteAt(context.Background(), medium[:n], t.off()); undo != nil {
			return t.failedAt(t.off(), undo)
		}
		n = 0
	}
	if err != nil {
		return t.failedAt(t.off()+int64(n), err)
	}
	return nil
}
