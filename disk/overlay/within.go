package overlay

import (
	"context"

	"kubevirt.io/disk/disk"
)

// Served is the disk for whoever serves it: a disk.Distant, if the image is far away.
func (o *Disk) Served() disk.Disk {
	if o.parallel > 1 {
		return distant{o}
	}
	return o
}

// distant is a disk over an image that is far away.
type distant struct{ *Disk }

var (
	_ disk.Distant    = distant{}
	_ disk.Disk       = within{}
	_ disk.Discarder  = within{}
	_ disk.Zeroer     = within{}
	_ disk.Extenter   = within{}
	_ disk.Syncer     = within{}
	_ disk.Estimator  = within{}
	_ disk.Accountant = within{}
)

// Within returns the disk for one command. A read waits for the image until ctx ends, where the
// file does not have the blocks; so do a write, a discard and a zeroing of a part of such a block,
// before they change anything. While they wait they hold no lock.
func (d distant) Within(ctx context.Context) disk.Disk { return within{d.Disk, ctx} }

// within is a disk for one command.
type within struct {
	*Disk
	ctx context.Context
}

func (w within) ReadAt(p []byte, off int64) (int, error) { return w.readAt(w.ctx, p, off) }

func (w within) WriteAt(p []byte, off int64) (int, error) { return w.writeAt(w.ctx, p, off) }

func (w within) Discard(off, length int64) error {
	return w.deallocate(w.ctx, changeDiscard, off, length)
}

func (w within) Zero(off, length int64) error {
	return w.deallocate(w.ctx, changeZero, off,
		length)
}

func (w within) Extent(off, length int64) (disk.Extent,
	error) {
	return w.extent(w.ctx, off, length)
}
