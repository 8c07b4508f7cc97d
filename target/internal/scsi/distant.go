package scsi

import (
	"context"
	"errors"
	"time"

	"kubevirt.io/disk/disk"
)

// Content of a disk.Distant may lie far away. A command that needs it is held until the content is
// there, nobody wants it any more, or nothing has come for so long that the transport gives up.
// Then the command ends with BUSY, the status that asks an initiator to send the command again
// later (SAM-5 5.3.1): nothing is lost, and the initiator need not give up the disk.
//
// Commands read and write content only by the methods of this file. For a disk that is not distant
// these are plain calls. For a distant disk, a call first asks for what is at hand. If that is not
// enough, it tells the transport that the command waits, and calls again with a context that can
// end the wait.

// A disk may return ErrNotNow before the time is over. The command is still held, and the call
// repeated after a pause that grows from firstPause to longestPause. An initiator that got these
// answers would soon run out of tries: QEMU has eight.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
)

// Executor is a goroutine that executes commands for the transport.
type Executor interface {
	// Waits is called by that goroutine before it waits for distant content, which may take long.
	// It returns how long the command may be held while nothing comes. An error ends In, Out or
	// Finish instead.
	Waits() (patience time.Duration, err error)
}

// distance holds what a unit needs for a distant disk.
type distance struct {
	far   disk.Distant    // nil: the disk is not distant
	near  disk.Disk       // the disk, limited to content at hand
	ended context.Context // a context that has ended
}

func distanceOf(d disk.Disk) distance {
	far, ok := d.(disk.Distant)
	if !ok {
		return distance{}
	}
	ended, end := context.WithCancel(context.Background())
	end()
	return distance{far: far, near: far.Within(ended), ended: ended}
}

func (t *Task) readAt(u *unit, p []byte, off int64) (n int, err error) {
	if u.far == nil {
		return u.disk.ReadAt(p, off)
	}
	err = t.await(u, func(d disk.Disk) (err error) {
		n, err = d.ReadAt(p, off)
		return err
	})
	return n, err
}

func (t *Task) writeAt(u *unit, p []byte, off int64) (stored int, err error) {
	if u.far == nil {
		return u.disk.WriteAt(p, off)
	}
	err = t.await(u, func(d disk.Disk) error {
		n, err := d.WriteAt(p, off)
		stored = max(stored, n) // the most that any try has stored
		return err
	})
	return stored, err
}

func (t *Task) discard(u *unit, off, length int64) error {
	if u.far == nil {
		return u.discards.Discard(off, length)
	}
	return t.await(u, func(d disk.Disk) error {
		return d.(disk.Discarder).Discard(off, length)
	})
}

func (t *Task) zero(u *unit, off, length int64) error {
	if u.far == nil {
		return u.zeroes.Zero(off, length)
	}
	return t.await(u, func(d disk.Disk) error { return d.(disk.Zeroer).Zero(off, length) })
}

func (t *Task) extent(u *unit, off, length int64) (e disk.Extent, err error) {
	if u.far == nil {
		return u.extents.Extent(off, length)
	}
	err = t.await(u, func(d disk.Disk) (err error) {
		e, err = d.(disk.Extenter).Extent(off, length)
		return err
	})
	return e, err
}

// lock waits for the ranges of t.hold. Their holder may wait for distant content, so this wait has
// the same limit as one for content.
func (t *Task) lock() error {
	u := t.unit
	if u.far == nil {
		u.ranges.Lock(&t.hold)
		return nil
	}
	if u.ranges.LockContext(u.ended, &t.hold) == nil {
		return nil
	}
	return t.wait(u, func(ctx context.Context) error {
		if u.ranges.LockContext(ctx, &t.hold) != nil {
			return disk.ErrNotNow
		}
		return nil
	})
}

// await makes a call to a unit's distant disk, and holds the command while the content is not
// there.
func (t *Task) await(u *unit, call func(disk.Disk) error) error {
	if err := call(u.near); err == nil || !errors.Is(err, disk.ErrNotNow) {
		return err
	}
	return t.wait(u, func(ctx context.Context) error {
		d := u.far.Within(ctx)
		for pause := firstPause; ; pause = min(2*pause, longestPause) {
			err := call(d)
			if !errors.Is(err, disk.ErrNotNow) {
				t.since = time.Time{}
				return err
			}
			select {
			case <-ctx.Done():
				return err
			case <-time.After(pause):
			}
		}
	})
}

// wait holds the command while f runs. The context of f ends when the command is aborted, the unit
// is removed, or the time is over. Only in the last case is the error disk.ErrNotNow.
func (t *Task) wait(u *unit, f func(context.Context) error) error {
	t.waited = true
	ctx, cancel, err := t.patience(u)
	if err != nil {
		return err
	}
	defer cancel()
	t.cancel.Store(&cancel)
	defer t.cancel.Store(nil)
	if t.aborted.Load() { // perhaps before t.cancel was set
		return errAborted
	}
	err = f(ctx)
	switch {
	case !errors.Is(err, disk.ErrNotNow):
		return err
	case t.aborted.Load():
		return errAborted
	case u.removed():
		return errLUNNotSupported
	}
	return err
}

// notHeld reports whether an error of these methods means that the command is not held any longer.
// A write has then changed only as many bytes as it returned.
func notHeld(err error) bool {
	return errors.Is(err, disk.ErrNotNow) || err == errAborted || err == errLUNNotSupported
}

// patience returns a context that limits how long the command waits. The time starts again whenever
// content has come, so a long command ends only if nothing comes. Background work of the device
// waits as long as the unit exists.
func (t *Task) patience(u *unit) (context.Context, context.CancelFunc, error) {
	if t.Executor == nil {
		ctx, cancel := context.WithCancel(u.ctx)
		return ctx, cancel, nil
	}
	patience, err := t.Executor.Waits()
	if err != nil {
		return nil, nil, err
	}
	if t.since.IsZero() {
		t.since = time.Now()
	}
	ctx, cancel := context.WithDeadline(u.ctx, t.since.Add(patience))
	return ctx, cancel, nil
}

// Waiting reports whether the command waits for distant content. Any goroutine may call it.
func (t *Task) Waiting() bool { return t.cancel.Load() != nil }

// Waited reports whether the command has ever waited for distant content.
func (t *Task) Waited() bool { return t.waited }
