package scsi

// outOrWrite takes the data of ORWRITE(16) (SBC-3 5.7) and sets every one bit on the medium. No
// other command changes a block between reading and writing it.
func outOrWrite(t *Task, off int64, p []byte) error {
	return t.writeOffered(t.off()+off, p, (*Task).orWrite)
}

// orWrite sets the bits of p on the medium; the caller holds the range.
func (t *Task) orWrite(p []byte, at int64) error {
	buf := scratch.Get().(*[scratchSize]byte)
	defer scratch.Put(buf)
	for len(p) > 0 {
		chunk := buf[:min(len(p), scratchSize)]
		if _, err := t.ReadAt(t.unit.served, chunk, at); err != nil {
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
