package overlay

import (
	"context"

	"kubevirt.io/disk/disk"
)

// Served returns the disk to serve: a disk.Distant if the image is far away.
func (s *Stack) Served() disk.Disk {
	if s.top.Load().parallel > 1 {
		return distant{s}
	}
	return s
}

// distant is a disk over an image that is far away.
type distant struct{ *Stack }

var (
	_ disk.Distant    = distant{}
	_ disk.Disk       = within{}
	_ disk.Discarder  = within{}
	_ disk.Zeroer     = within{}
	_ disk.Extenter   = within{}
	_ disk.Layered    = within{}
	_ disk.Estimator  = within{}
	_ disk.Accountant = within{}
)

// Within returns the disk for one command. If the file lacks blocks, a read waits for the image
// until ctx ends. A write, a discard or a zeroing of a part of such a block waits too, before it
// changes anything. While they wait they hold no lock.
func (d distant) Within(ctx context.Context) disk.Disk { return within{d.Stack, ctx} }

// within is a disk for one command.
type within struct {
	*Stack
	ctx context.Context
}

func (w within) ReadAt(p []byte, off int64) (int, error) { return w.readAt(w.ctx, p, off) }

func (w within) WriteAt(p []byte, off int64) (int, error) { return w.writeAt(w.ctx, p, off) }

func (w within) Discard(off, length int64) error {
	return w.deallocate(w.ctx, changeDiscard, off, length)
}

func (w within) Zero(off, length int64) error {
	return w.deallocate(w.ctx, changeZero, off, length)
}

func (w within) Extent(off, length int64) (disk.Extent, error) {
	return w.extent(w.ctx, off, length)
}

func (w within) Depth(off, length int64) (depth int, n int64, err error) {
	return w.depth(w.ctx, off, length)
}
