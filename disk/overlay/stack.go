package overlay

import (
	"context"
	"errors"
	"io/fs"
	"sync/atomic"

	"kubevirt.io/disk/disk"
)

// Stack is a disk of one or more layers. The guest changes its top, and the top can be replaced
// while the guest uses the disk. Stack has the optional interfaces of a Disk.
//
// Readers lock nothing: a read that began before a switch may answer from the former top. A change
// holds the gate of its top while it changes file and map, and not while it waits for far content.
// So Freeze waits only for storage, and only changes wait for Freeze.
type Stack struct {
	top     atomic.Pointer[Disk]
	frozen  *Disk                   // from Freeze to Switch or Thaw
	changes atomic.Uint64           // counts the changes of the layers
	close   func() error            // nil: the top is the only layer
	tree    *Tree                   // of the layers; nil: the top is the only layer
	others  atomic.Pointer[[]*Disk] // all layers but the top, also of snapshots; nil: none
}

var (
	_ disk.Disk       = (*Stack)(nil)
	_ disk.Discarder  = (*Stack)(nil)
	_ disk.Zeroer     = (*Stack)(nil)
	_ disk.Extenter   = (*Stack)(nil)
	_ disk.Layered    = (*Stack)(nil)
	_ disk.Estimator  = (*Stack)(nil)
	_ disk.Accountant = (*Stack)(nil)
	_ disk.Mapper     = (*Stack)(nil)
)

// NewStack makes a disk of a layer and those below it.
func NewStack(top *Disk) *Stack {
	s := new(Stack)
	s.top.Store(top)
	return s
}

// Top is the layer that the guest changes.
func (s *Stack) Top() *Disk { return s.top.Load() }

// Freeze stops all changes of the guest, which wait until Switch or Thaw. Changes acknowledged
// before are in the layers. One call at a time.
func (s *Stack) Freeze() {
	s.frozen = s.top.Load()
	s.frozen.gate.Lock()
	s.frozen.frozen = true
}

// Switch makes the guest's changes go to another top, which reads the same. The former top does not
// change any more.
func (s *Stack) Switch(top *Disk) {
	// First publish the new top: a change with an old pointer to it must not change it before all
	// readers use it.
	s.top.Store(top)
	top.gate.Lock()
	if top.frozen {
		top.frozen = false
		top.thaws++
		top.settled.Store(false)
	}
	top.gate.Unlock()
	s.frozen.gate.Unlock()
}

// Thaw lets changes go on in the same top.
func (s *Stack) Thaw() {
	s.frozen.frozen = false
	s.frozen.thaws++
	s.frozen.settled.Store(false)
	s.frozen.gate.Unlock()
}

// mustRetry reports whether a call has failed only because the layers have changed meanwhile.
// before is the value of changes before the call. Any other error is final: an image that is closed
// stays closed.
func (s *Stack) mustRetry(err error, before uint64) bool {
	return err != nil && (errors.Is(err, errFrozen) ||
		errors.Is(err, fs.ErrClosed) && s.changes.Load() != before)
}

// retry calls call with the layer in place. It calls again after an error if the layers have
// changed.
func (s *Stack) retry(place *atomic.Pointer[Disk], call func(o *Disk) error) error {
	for {
		before := s.changes.Load()
		if err := call(place.Load()); !s.mustRetry(err, before) {
			return err
		}
	}
}

// Size is the size of the top, which may grow.
func (s *Stack) Size() int64 { return s.top.Load().Size() }

// Far reports whether the image is far away: see disk.Far.
func (s *Stack) Far() bool { return s.top.Load().parallel > 1 }

// ReadAt calls Disk.ReadAt.
func (s *Stack) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	err = s.retry(&s.top, func(o *Disk) (err error) {
		n, err = o.ReadAt(ctx, p, off)
		return err
	})
	return n, err
}

// WriteAt calls Disk.WriteAt.
func (s *Stack) WriteAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	err = s.retry(&s.top, func(o *Disk) (err error) {
		n, err = o.WriteAt(ctx, p, off)
		return err
	})
	return n, err
}

// Discard calls Disk.Discard.
func (s *Stack) Discard(ctx context.Context, off, length int64) error {
	return s.deallocate(ctx, changeDiscard, off, length)
}

// Zero calls Disk.Zero.
func (s *Stack) Zero(ctx context.Context, off, length int64) error {
	return s.deallocate(ctx, changeZero, off, length)
}

func (s *Stack) deallocate(ctx context.Context, op change, off, length int64) error {
	return s.retry(&s.top, func(o *Disk) error { return o.deallocate(ctx, op, off, length) })
}

func (s *Stack) Extent(ctx context.Context, off, length int64) (e disk.Extent, err error) {
	err = s.retry(&s.top, func(o *Disk) (err error) {
		e, err = o.Extent(ctx, off, length)
		return err
	})
	return e, err
}

// Depth calls Disk.Depth.
func (s *Stack) Depth(ctx context.Context, off, length int64) (depth int, n int64, err error) {
	err = s.retry(&s.top, func(o *Disk) (err error) {
		depth, n, err = o.Depth(ctx, off, length)
		return err
	})
	return depth, n, err
}

// Slow calls Disk.Slow.
func (s *Stack) Slow(off int64) bool { return s.top.Load().Slow(off) }

// Flush makes acknowledged changes durable, in every layer.
func (s *Stack) Flush() error {
	top := s.top.Load()
	for o := top; o != nil; o = o.lower.Load() {
		switch {
		case o == top:
			if err := o.Flush(); err != nil {
				return err
			}
		case !o.settled.Load():
			if err := o.Settle(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Grow enlarges the disk by a hole. One call at a time, and none while Freeze is called.
func (s *Stack) Grow(size int64) error { return s.top.Load().Grow(size) }

// Usage is the sum of all layers, also those of snapshots.
func (s *Stack) Usage() (u disk.Usage, err error) {
	err = s.retry(&s.top, func(o *Disk) (err error) {
		u, err = o.Usage()
		if others := s.others.Load(); others != nil {
			for _, o := range *others {
				other, failed := o.Usage()
				u.Used += other.Used
				err = errors.Join(err, failed)
			}
		}
		return err
	})
	return u, err
}

func (s *Stack) Map() *disk.Map { return s.top.Load().Map() }

// Close closes all layers.
func (s *Stack) Close() error {
	if s.close != nil {
		return s.close()
	}
	return s.top.Load().Close()
}
