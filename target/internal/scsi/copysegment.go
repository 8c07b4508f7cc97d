package scsi

import (
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/serving"
)

// copier executes one EXTENDED COPY.
type copier struct {
	t       *Task
	op      *copyOperation
	list    *copyList
	own     participant
	targets []participant // as list.targets
	buf     *[scratchSize]byte
	shift   uint // a logical block of the segment's units has 2^shift bytes
	runs    [maxCopyRuns]copyRun
	read    rangelock.Hold
	write   rangelock.Hold
}

// participant is a logical unit that a copy reads or writes.
type participant struct {
	unit   *unit  // nil: no such unit
	resets uint32 // unit.resets when the copy began: a reset ends the copy
}

// segment executes one segment descriptor and returns the sense data of its failure, or nil.
func (c *copier) segment(i int) *senseError {
	s := &c.list.segments[i]
	src, failure := c.find(s.source, segmentSource)
	if failure != nil {
		return failure
	}
	dst, failure := c.find(s.dest, segmentDest)
	if failure != nil {
		return failure
	}
	if s.blocks == 0 {
		return nil
	}
	if failure := checkSegment(src.unit, s.from, s.blocks, segmentFrom); failure != nil {
		return failure
	}
	if failure := checkSegment(dst.unit, s.to, s.blocks, segmentTo); failure != nil {
		return failure
	}

	if src.unit.shift != dst.unit.shift { // a number of blocks would mean two lengths
		return copyAborted(ascIncorrectTargetType, segmentDest)
	}
	c.shift = src.unit.shift
	from, to, total := int64(s.from)<<c.shift, int64(s.to)<<c.shift, int64(s.blocks)<<c.shift
	// If the destination overlaps the end of the source, copy from the end, so that no source block
	// is overwritten before it is read.
	backwards := src.unit == dst.unit && from < to && to < from+total
	written := int64(0)
	for written < total {
		n := min(scratchSize, total-written)
		at := written
		if backwards {
			at = total - written - n
		}
		if cause := c.step(src, dst, from+at, to+at, n); cause != nil {
			return c.failed(cause, written, total, backwards)
		}
		written += n
		c.op.bytes.Add(uint64(n))
	}
	if !dst.unit.mode.writeBack() {
		if err := dst.unit.flush(); err != nil {
			return c.failed(&copyCause{dst.unit, serving.OpWrite, err}, 0, total, backwards)
		}
	}
	return nil
}

// flush flushes the destination. The command may have been sent to another unit, so nothing keeps
// this one from being removed.
func (u *unit) flush() error {
	if !u.Begin() {
		return errLUNNotSupported
	}
	defer u.End()
	return u.Disk.Flush()
}

// find returns the logical unit for a CSCD descriptor ID (SPC-4 6.4.6.1). field is the offset of
// the ID in the segment descriptor.
func (c *copier) find(id uint16, field int) (*participant, *senseError) {
	switch {
	case id == ownTarget:
		return &c.own, nil
	case int(id) >= len(c.targets):
		return nil, copyAborted(ascUnreachableTarget, field)
	case c.targets[id].unit == nil:
		return nil, copyAborted(ascTargetNotReachable, field)
	case c.list.targets[id].peripheral != peripheralDisk:
		return nil, copyAborted(ascIncorrectTargetType, field)
	}
	return &c.targets[id], nil
}

// checkSegment refuses blocks that the unit does not have. No READ or WRITE fails here, so there is
// no status of a unit to report. The field pointer alone says what is wrong.
func checkSegment(u *unit, lba, count uint64, field int) *senseError {
	if u.checkRange(lba, count) == nil {
		return nil
	}
	if lba < u.blocks() {
		field = segmentBlocks
	}
	return copyAborted(ascNone, field)
}

// copyCause says why a step failed, at which unit, and at which part of the work there. It is nil
// if neither unit is the cause.
type copyCause struct {
	unit *unit
	op   serving.Operation
	err  error
}

// step copies n bytes, at most scratchSize. It holds both ranges meanwhile.
//
// It checks for aborts, resets and preemptions after it has got the ranges. A write to the same
// blocks waits for this step, or this step for the write. So the copy writes nothing old after such
// an event was answered.
func (c *copier) step(src, dst *participant, from, to, n int64) *copyCause {
	// A removed unit ends the copy as it ends a READ or WRITE. Its disk is not released during a
	// step.
	if !src.unit.Begin() {
		return &copyCause{src.unit, serving.OpRead, errLUNNotSupported}
	}
	defer src.unit.End()
	if !dst.unit.Begin() {
		return &copyCause{dst.unit, serving.OpWrite, errLUNNotSupported}
	}
	defer dst.unit.End()
	if cause := c.admitBoth(src, dst); cause != nil {
		return cause
	}
	c.t.dev.disks.KeepOwner(src.unit.served)
	c.t.dev.disks.KeepOwner(dst.unit.served)
	if err := dst.unit.settleAtomic(); err != nil {
		return &copyCause{dst.unit, serving.OpWrite, err}
	}
	c.lock(src.unit, dst.unit, from, to, n)
	defer c.unlock(src.unit, dst.unit)
	if cause := c.admitBoth(src, dst); cause != nil {
		return cause
	}
	if dst.unit.atomicKept.Load() {
		return &copyCause{dst.unit, serving.OpWrite, errAtomicKept}
	}
	runs, err := c.readRuns(src.unit, c.buf[:n], from, c.runs[:0])
	if err != nil {
		return &copyCause{src.unit, serving.OpRead, err}
	}
	if err := c.writeRuns(dst.unit, c.buf[:n], to, runs); err != nil {
		return &copyCause{dst.unit, serving.OpWrite, err}
	}
	return nil
}

// admitBoth returns why the copy cannot go on, or nil.
func (c *copier) admitBoth(src, dst *participant) *copyCause {
	if err := c.t.stillWanted(); err != nil {
		return &copyCause{err: err}
	}
	if err := c.admit(src, false); err != nil {
		return &copyCause{src.unit, serving.OpRead, err}
	}
	if err := c.admit(dst, true); err != nil {
		return &copyCause{dst.unit, serving.OpWrite, err}
	}
	return nil
}

// lock holds both ranges. Every copy locks units in the same order, so that no two copies wait for
// each other.
func (c *copier) lock(src, dst *unit, from, to, n int64) {
	by := c.t.Nexus.Name()
	c.read.Set(rangelock.Read, by, from, n)
	c.write.Set(rangelock.Write, by, to, n)
	switch {
	case src == dst:
		src.Ranges.LockPair(&c.read, &c.write)
	case src.order < dst.order:
		src.Ranges.Lock(&c.read)
		dst.Ranges.Lock(&c.write)
	default:
		dst.Ranges.Lock(&c.write)
		src.Ranges.Lock(&c.read)
	}
}

func (c *copier) unlock(src, dst *unit) {
	src.Ranges.Unlock(&c.read)
	dst.Ranges.Unlock(&c.write)
}

// admit makes the same checks as a READ or WRITE of the same initiator to the unit.
func (c *copier) admit(p *participant, writes bool) error {
	d, u, n := c.t.dev, p.unit, c.t.Nexus
	rights := duringWriteExclusive // a READ
	if writes {
		rights = 0
	}
	at := n.at(u)
	switch {
	case at == nil || u.Removed() || at.unprobed.Load():
		return errLUNNotSupported
	case u.resets.Load() != p.resets:
		return &senseError{key: UnitAttention, code: ascBusDeviceReset}
	case d.conflicts(at, n, rights):
		return errConflict
	}
	if writes {
		if err := u.writable(); err != nil {
			return err
		}
	}
	if !d.claim(at, n) {
		return errConflict
	}
	return nil
}

// maxCopyRuns bounds how many runs of data and holes a step distinguishes. The rest of the step
// counts as data.
const maxCopyRuns = 32

// copyRun is a part of a step that is either all data or a hole.
type copyRun struct {
	length int64 // bytes, whole blocks
	data   bool
}

// readRuns reads the data at off into p, skips holes, and returns the runs of both.
func (c *copier) readRuns(u *unit, p []byte, off int64, runs []copyRun) ([]copyRun, error) {
	for at, n := int64(0), int64(len(p)); at < n; {
		run := copyRun{length: n - at, data: true}
		if u.Extents != nil && len(runs) < cap(runs) {
			e, err := c.t.Extent(u.served, off+at, n-at)
			if err != nil {
				return nil, err
			}
			if e.Length <= 0 {
				return nil, errEmptyExtent
			}
			size := int64(u.blockSize())
			run = copyRun{length: e.Length &^ (size - 1), data: e.Data}
			if e.Data || run.length == 0 { // a block with any data is data
				run.data = true
				run.length = min((e.Length+size-1)&^(size-1), n-at)
			}
		}
		at += run.length
		if last := len(runs) - 1; last >= 0 &&
			(runs[last].data == run.data || len(runs) == cap(runs)) {
			runs[last].length += run.length
			runs[last].data = runs[last].data || run.data
			continue
		}
		runs = append(runs, run)
	}
	at := int64(0)
	for _, run := range runs {
		if run.data {
			if _, err := c.t.ReadAt(u.served, p[at:at+run.length], off+at); err != nil {
				return nil, err
			}
		}
		at += run.length
	}
	return runs, nil
}

// writeRuns stores what readRuns has read. A hole stays a hole if the disk can make one.
func (c *copier) writeRuns(u *unit, p []byte, off int64, runs []copyRun) error {
	for _, run := range runs {
		part := p[:run.length]
		p = p[run.length:]
		if err := c.writeRun(u, part, off, run.data); err != nil {
			return err
		}
		off += run.length
	}
	return nil
}

func (c *copier) writeRun(u *unit, p []byte, off int64, data bool) error {
	switch {
	case data:
	case u.Zeroes != nil:
		return c.t.Zero(u.served, off, int64(len(p)))
	case u.Discards != nil:
		return c.t.Discard(u.served, off, int64(len(p)))
	default:
		clear(p)
	}
	_, err := c.t.WriteAt(u.served, p, off)
	return err
}
