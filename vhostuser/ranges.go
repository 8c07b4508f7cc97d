package vhostuser

import (
	"encoding/binary"

	"kubevirt.io/disk/disk"
)

// ranges discards or zeroes the ranges of a request.
func (run *run) ranges(kind uint32, out []segment) error {
	d := run.q.c.disk
	var b [maxRanges * rangeSize]byte
	length := lengthOf(out)
	switch {
	case length == 0 || length%rangeSize != 0:
		return errRange
	case length > int64(len(b)):
		return errUnsupported
	case kind == blkDiscard && d.Discards == nil, kind == blkWriteZeroes && d.Zeroes == nil:
		return errUnsupported
	}
	_, _ = takeFront(out, b[:length])
	all := b[:length]
	for r := all; len(r) > 0; r = r[rangeSize:] { // check all of them before anything is done
		flags, sectors := binary.LittleEndian.Uint32(r[12:]), binary.LittleEndian.Uint32(r[8:])
		if flags&^flagUnmap != 0 || kind == blkDiscard && flags != 0 || sectors > maxRangeSectors {
			return errUnsupported
		}
		err := checkRange(binary.LittleEndian.Uint64(r), int64(sectors)*disk.SectorSize, d.Size())
		if err != nil {
			return err
		}
	}
	if err := run.begin(true); err != nil {
		return err
	}
	defer d.End()
	if run.Reading {
		run.Share(d)
	}
	run.Enter(d)
	defer run.Leave()
	for r := all; len(r) > 0; r = r[rangeSize:] {
		off := int64(binary.LittleEndian.Uint64(r)) * disk.SectorSize
		length := int64(binary.LittleEndian.Uint32(r[8:])) * disk.SectorSize
		unmap := kind == blkDiscard || binary.LittleEndian.Uint32(r[12:])&flagUnmap != 0
		if err := run.clear(kind, off, length, unmap); err != nil {
			return err
		}
	}
	if run.q.c.writeThrough.Load() != 0 {
		return d.Disk.Flush()
	}
	return nil
}

var zeroes [piece]byte

// clear discards a range, or makes it read as zeros. Only with unmap, zeroing may give space back.
func (run *run) clear(kind uint32, off, length int64, unmap bool) error {
	d := run.q.c.disk
	if length == 0 {
		return nil
	}
	if err := run.lock(off, length); err != nil {
		return err
	}
	defer run.unlock()
	most := int64(stretch)
	step := func(off, n int64) error { return run.r.Zero(d, off, n) }
	switch {
	case kind == blkDiscard:
		step = func(off, n int64) error { return run.r.Discard(d, off, n) }
	case !unmap:
		most = piece
		step = func(off, n int64) error {
			_, err := run.r.WriteAt(d, zeroes[:n], off)
			return err
		}
	}
	return run.r.Steps(d, off, off+length, most, func() error {
		return run.q.c.client.Permits(&run.r, d, true)
	}, step)
}
