package scsi

// outOrWrite is the data of ORWRITE(16) (SBC-3 5.7): every bit that is one is set on the medium. Between reading and
// writing a block no other command changes it.
func outOrWrite(t *Task, off int64, p []byte) error {
	p = p[:len(p)&^(BlockSize-1)]
	if len(p) == 0 {
		return nil
	}
	u := t.unit
	at := t.off() + off
	if err := t.lockRange(holdWrite, at, int64(len(p))); err != nil {
		return err
	}
	defer u.ranges.unlock(&t.hold)
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	for len(p) > 0 {
		chunk := buf[:min(len(p), scratchSize)]
		if _, err := u.disk.ReadAt(chunk, at); err != nil {
			return err
		}
		for i := range chunk {
			chunk[i] |= p[i]
		}
		if err := t.writeDisk(chunk, at); err != nil {
			return err
		}
		p, at = p[len(chunk):], at+int64(len(chunk))
	}
	return nil
}
