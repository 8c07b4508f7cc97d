package scsi

// prepareSync is SYNCHRONIZE CACHE(10) and (16) (SBC-3 5.25). A range of no blocks reaches to the
// end.
func prepareSync(t *Task) error { return t.address() }

// finishSync flushes the whole disk, which covers any range. With IMMED the standard lets the
// status come before the flush; we give it afterwards all the same, so that it never claims what
// may still fail.
func finishSync(t *Task) (Status, error) { return t.flush() }
