package overlay

import (
	"context"

	"kubevirt.io/disk/disk/internal/rawfile"
)

// readKeeping reads the image in whole units, and keeps them. That they cannot be kept, because
// there is no space, does not concern the reader.
func (o *Disk) readKeeping(ctx context.Context, p []byte, off int64) (int, error) {
	o.watch.missed(off)
	buf := o.scratch.Get().(*[]byte)
	defer o.scratch.Put(buf)
	begin := off / o.opt.Unit * o.opt.Unit
	unit := (*buf)[:min(o.opt.Unit, min(o.mapped, o.Size())-begin)]
	switch n, err := o.readForGuest(ctx, unit, begin); {
	case err != nil:
		// The range alone: the error may be elsewhere in the unit.
		return o.readForGuest(ctx, p, off)
	case n == 0:
		return 0, nil
	}
	if !o.failed.Load() {
		_ = o.keep(unit, begin, o.writeFile)
	}
	// The guest may have written in between; what was read is as good as what it wrote, as both
	// were asked for at once.
	return copy(p, unit[off-begin:]), nil
}

// keep stores what was read from the image in the blocks that are still not marked: a guest's
// change wins. The range begins at a block and ends at one or at the end of the image. What is not
// zero goes to the file by write.
func (o *Disk) keep(p []byte, off int64, write func(p []byte, off int64) error) error {
	first, last := o.span(off, int64(len(p)))
	held := o.locks.lock(first, last)
	defer o.locks.unlock(held)
	for block := first; block <= last; {
		set, end := o.blocks.run(block, last)
		if !set {
			from := block*o.granule - off
			to := min(end*o.granule-off, int64(len(p)))
			if err := o.store(p[from:to], off+from, write); err != nil {
				return err
			}
			if err := o.mark(block, end-1); err != nil {
				return err
			}
		}
		block = end
	}
	return nil
}

// store puts p into the file, zeros as holes. The file may hold something there that a lost write
// left.
func (o *Disk) store(p []byte, off int64, write func(p []byte, off int64) error) error {
	for len(p) > 0 {
		zero, n := rawfile.LeadingRun(p, off)
		var err error
		if zero {
			err = o.punch(off, int64(n))
		} else {
			err = write(p[:n], off)
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// giveBack frees what the file has taken below blocks that are not marked: what is left of a full
// volume belongs to the guest, and to the small files beside the disk. Where that fails it only
// takes longer.
func (o *Disk) giveBack(first, last int64) {
	held := o.locks.lock(first, last)
	defer o.locks.unlock(held)
	for block := first; block <= last; {
		set, end := o.blocks.run(block, last)
		if !set {
			begin, _ := o.bounds(block)
			_, stop := o.bounds(end - 1)
			_ = o.punch(begin, stop-begin)
		}
		block = end
	}
}

func (o *Disk) writeFile(p []byte, off int64) error {
	_, err := o.file.WriteAt(p, off)
	return err
}

// punch makes a range of the file a hole that mostly is one: asking is cheaper than changing it.
func (o *Disk) punch(off, length int64) error {
	if e, err := o.file.Extent(off, length); err == nil && !e.Data && e.Length == length {
		return nil
	}
	return o.file.Discard(off, length)
}
