package scsi

import "kubevirt.io/disk/internal/rangelock"

// prepareCompareAndWrite is COMPARE AND WRITE (SBC-3 5.2): the data are the blocks to compare, followed by as
// many to write.
func prepareCompareAndWrite(t *Task) error {
	t.lba = lba16(&t.CDB)
	t.count = uint64(t.CDB[13])
	if err := t.inRange(); err != nil {
		return err
	}
	if t.count > maxCompareAndWrite {
		return invalidField(13, 7)
	}
	t.fua = t.CDB[1]&bitFUA != 0
	t.expect(2*t.length(), true)
	return t.exactly(13)
}

// outCompareAndWrite holds the range exclusively, so that no other command sees or changes anything between
// comparing and writing.
func outCompareAndWrite(t *Task, _ int64, p []byte) error {
	u := t.unit
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	medium := buf[:t.length()]
	if err := t.lockRange(rangelock.Exclusive, t.off(), t.length()); err != nil {
		return err
	}
	defer u.ranges.Unlock(&t.hold)
	if _, err := u.disk.ReadAt(medium, t.off()); err != nil {
		return err
	}
	if err := differs(p[:len(medium)], medium, 0); err != nil {
		return err
	}
	return t.writeDisk(p[len(medium):], t.off())
}
