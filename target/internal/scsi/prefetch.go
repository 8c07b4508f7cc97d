package scsi

// preparePrefetch is PRE-FETCH(10) and (16) (SBC-3 5.9). Zero blocks mean all blocks up to the end.
func preparePrefetch(t *Task) error {
	if err := t.address(); err != nil {
		return err
	}
	if t.count == 0 {
		t.count = t.unit.blocks() - t.lba
	}
	return nil
}

// finishPrefetch reads at most one transfer length ahead. It returns GOOD and not CONDITION MET,
// which would promise something: the host's page cache may drop the data at any time. With IMMED
// the initiator does not wait, so nothing is read.
func finishPrefetch(t *Task) (Status, error) {
	if t.CDB[1]&bitImmed != 0 {
		return StatusGood, nil
	}
	t.count = min(t.count, maxTransfer>>t.unit.shift)
	if err := t.forEachChunk(func(int64, []byte) error { return nil }); err != nil {
		return StatusCheckCondition, err
	}
	return StatusGood, nil
}
