package scsi

// prepareWriteAndVerify is WRITE AND VERIFY(10), (12) and (16) (SBC-3 5.41 to 5.43).
func prepareWriteAndVerify(t *Task) error {
	if err := t.transfer(); err != nil {
		return err
	}
	if t.bytchk() > verifyData {
		return invalidField(1, 2)
	}
	t.fua = true // verified data must be on the medium
	if t.Length > 0 {
		t.Dir = DirOut
	}
	return nil
}

// outWriteAndVerify reads back what it wrote before another write can change the blocks. With
// BYTCHK it also compares.
func outWriteAndVerify(t *Task, off int64, p []byte) error {
	return t.writeOffered(t.off()+off, p, (*Task).writeAndVerify)
}

func (t *Task) writeAndVerify(p []byte, at int64) error {
	if err := t.writeDisk(p, at); err != nil {
		return err
	}
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	for done := 0; done < len(p); done += scratchSize {
		chunk := p[done:min(done+scratchSize, len(p))]
		if _, err := t.ReadAt(t.unit.served, buf[:len(chunk)], at+int64(done)); err != nil {
			return err
		}
		if t.bytchk() == verifyData {
			if err := differs(chunk, buf[:len(chunk)], at-t.off()+int64(done)); err != nil {
				return err
			}
		}
	}
	return nil
}
