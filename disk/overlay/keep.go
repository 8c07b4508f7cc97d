package overlay

import (
	"context"

	"kubevirt.io/disk/disk/internal/rawfile"
)

// readKeeping reads the image in whole units and keeps them in the file. If there is no space for
// that, the read still succeeds.
func (o *Disk) readKeeping(ctx context.Context, p []byte, off int64) (int, error) {
	o.watch.missed(off)
	buf := o.scratch.Get().(*[]byte)
	defer o.scratch.Put(buf)
	begin := off / o.opt.Unit * o.opt.Unit
	unit := (*buf)[:min(o.opt.Unit, min(o.mapped, o.Size())-begin)]
	switch n, err := o.readForGuest(ctx, unit, begin); {
	case err != nil:
		// Read only the range: the unit may be unreadable in another part.
		return o.readForGuest(ctx, p, off)
	case n == 0:
		return 0, nil
	}
	if !o.fate.failed.Load() {
		_ = o.keep(unit, begin, o.writeFile)
	}
	// The guest may have written in between. The old content is right, too, because the two
	// requests overlapped.
	return copy(p, unit[off-begin:]), nil
}

// keep stores content of the image in those blocks that are still not marked: a guest's change
// wins. The range begins with a block, and ends with one or with the image. write writes to the
// file all of the content that is not zero.
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

// store writes p to the file, and zeros as holes. A lost write may have left other data there.
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

// giveBack frees the space of blocks that are not marked. The space left on a full volume is for
// the guest, and for the small files next to the disk. If it fails, copying only takes longer.
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
	_, err := o.file.WriteAt(context.Background(), p, off)
	return err
}

// punch makes a hole of a range that mostly is one already: asking is cheaper than punching.
func (o *Disk) punch(off, length int64) error {
	e, err := o.file.Extent(context.Background(), off, length)
	if err == nil && !e.Data && e.Length == length {
		return nil
	}
	return o.file.Discard(context.Background(), off, length)
}
