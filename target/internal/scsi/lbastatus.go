package scsi

import (
	"encoding/binary"
	"errors"
	"math"
)

// Values of PROVISIONING STATUS (SBC-3 5.4.2.3).
const (
	statusMapped      = 0
	statusDeallocated = 1
)

// lbaStatusLen is the length of the parameter data in bytes: a header and one descriptor.
const lbaStatusLen = 24

// maxExtentSteps bounds how many extents of the disk one answer combines.
const maxExtentSteps = 1024

// prepareLBAStatus is GET LBA STATUS (SBC-3 5.4). The length must be known before the disk is
// asked, so the answer always has one descriptor: the run at the starting address. The initiator
// asks again for the next run.
func prepareLBAStatus(t *Task) error {
	t.lba = lba16(&t.CDB)
	if err := t.inRange(); err != nil {
		return err
	}
	t.data = append(t.data[:0], make([]byte, lbaStatusLen)...)
	t.reply(binary.BigEndian.Uint32(t.CDB[10:]))
	return nil
}

func inLBAStatus(t *Task, off int64, p []byte) error {
	if off == 0 {
		if err := t.fillLBAStatus(); err != nil {
			return err
		}
	}
	copy(p, t.data[off:])
	return nil
}

func (t *Task) fillLBAStatus() error {
	count, data, err := t.extentOf(t.lba)
	if err != nil {
		return err
	}
	var b [lbaStatusLen]byte
	binary.BigEndian.PutUint32(b[0:], lbaStatusLen-4)
	binary.BigEndian.PutUint64(b[8:], t.lba)
	binary.BigEndian.PutUint32(b[16:], count)
	b[20] = statusDeallocated
	if data {
		b[20] = statusMapped
	}
	copy(t.data, b[:])
	return nil
}

var errEmptyExtent = errors.New("disk reports an empty extent")

// extentOf counts the blocks from lba on that are all mapped or all deallocated. A block with any
// mapped byte is mapped.
func (t *Task) extentOf(lba uint64) (count uint32, data bool, err error) {
	u := t.unit
	start := int64(lba) << u.shift
	end := min(int64(u.blocks())<<u.shift, start+math.MaxUint32<<u.shift)
	at := start
	for step := 0; step < maxExtentSteps && at < end; step++ {
		e, err := t.Extent(u.served, at, end-at)
		if err != nil {
			return 0, false, err
		}
		if e.Length <= 0 {
			return 0, false, errEmptyExtent
		}
		if step > 0 && e.Data != data {
			break
		}
		data = e.Data
		at = min(at+e.Length, end)
	}
	length := at - start
	switch {
	case data:
		length += int64(u.blockSize()) - 1 // a block that begins with data is mapped
	case length < int64(u.blockSize()):
		length, data = int64(u.blockSize()), true // data begins within the first block
	}
	return uint32(length >> u.shift), data, nil
}
