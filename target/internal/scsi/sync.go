package scsi

// prepareSync is SYNCHRONIZE CACHE(10) and (16) (SBC-3 5.25). Zero blocks mean all blocks up to the
// end.
func prepareSync(t *Task) error { return t.address() }

// finishSync flushes the whole disk, which covers any range. With IMMED the standard allows the
// status before the flush. We still send it afterwards, so that it never claims more than is
// certain.
func finishSync(t *Task) (Status, error) { return t.flush() }
