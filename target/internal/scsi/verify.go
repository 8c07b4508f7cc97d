package scsi

import "bytes"

// Values of BYTCHK (SBC-3 5.29).
const (
	verifyMedium   = 0 // read the blocks
	verifyData     = 1 // compare them with as much data
	verifyRepeated = 3 // compare each of them with one block of data
)

func (t *Task) bytchk() byte { return t.CDB[1] >> 1 & 3 }

// prepareVerify is VERIFY(10), (12) and (16) (SBC-3 5.29 to 5.31).
func prepareVerify(t *Task) error {
	if err := t.address(); err != nil {
		return err
	}
	if err := t.limited(maxTransfer >> t.unit.shift); err != nil {
		return err
	}
	switch t.bytchk() {
	case verifyMedium:
	case verifyData:
		t.expect(t.length(), false)
	case verifyRepeated:
		if t.count > 0 {
			t.expect(int64(t.unit.blockSize()), true)
		}
	default:
		return invalidField(1, 2)
	}
	if t.Offered < t.Length {
		return errShortTransfer // whether or not the offered data differs
	}
	return nil
}

func outVerify(t *Task, off int64, p []byte) error {
	if t.bytchk() == verifyData {
		return t.compareDisk(t.off()+off, p, off)
	}
	return t.forEachChunk(func(at int64, chunk []byte) error {
		for i := 0; i < len(chunk); i += len(p) {
			if err := differs(p, chunk[i:i+len(p)], 0); err != nil {
				return err
			}
		}
		return nil
	})
}

func finishVerify(t *Task) (Status, error) {
	if t.bytchk() != verifyMedium {
		return StatusGood, nil
	}
	if err := t.forEachChunk(func(int64, []byte) error { return nil }); err != nil {
		return StatusCheckCondition, err
	}
	return StatusGood, nil
}

// forEachChunk reads the command's range in chunks of whole blocks.
func (t *Task) forEachChunk(use func(at int64, chunk []byte) error) error {
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	for at := int64(0); at < t.length(); at += scratchSize {
		chunk := buf[:min(scratchSize, t.length()-at)]
		if err := t.stillWanted(); err != nil {
			return err
		}
		if err := t.readDisk(t.off()+at, chunk); err != nil {
			return err
		}
		if err := use(at, chunk); err != nil {
			return err
		}
	}
	return nil
}

// compareDisk compares p with the disk at off. base is the offset of p within the sent data.
func (t *Task) compareDisk(off int64, p []byte, base int64) error {
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	for len(p) > 0 {
		chunk := buf[:min(len(p), scratchSize)]
		if err := t.readDisk(off, chunk); err != nil {
			return err
		}
		if err := differs(p[:len(chunk)], chunk, base); err != nil {
			return err
		}
		p, off, base = p[len(chunk):], off+int64(len(chunk)), base+int64(len(chunk))
	}
	return nil
}

// differs returns a MISCOMPARE with the first difference between data and the medium. base is the
// offset of data within the sent data.
func differs(data, medium []byte, base int64) error {
	if bytes.Equal(data, medium) {
		return nil
	}
	for i := range data {
		if data[i] != medium[i] {
			return miscompare(base + int64(i))
		}
	}
	return nil
}

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
