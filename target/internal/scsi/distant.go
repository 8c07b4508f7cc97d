package scsi

import (
	"context"
	"errors"
	"time"

	"kubevirt.io/disk/disk"
)

// Content of a disk.Distant may lie far away. A command that needs it is held: it waits until the
// content is there, nobody wants it any more, or nothing has come for so long that the transport
// gives it up. Then it ends with BUSY, the status that asks an initiator to send the command again
// later (SAM-5 5.3.1): nothing is lost, and the disk must not be given up.
//
// All calls by which a command uses content go through the methods of this file. Where the disk is
// not distant they are plain calls. Where it is, a call first asks for what is at hand. Only if
// that is not enough, the transport is told that the command waits, and the call is made with a
// context by which that can be ended.

// A disk may say ErrNotNow before its time. The command is held all the same, and the call made
// again after a pause, which grows from firstPause to longestPause. An initiator that got these
// answers would soon have used up its tries: QEMU has eight.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
)

// Executor is a goroutine that executes commands for the transport.
type Executor interface {
	// Waits is called by that goroutine when it is about to wait for content that lies far away,
	// which may take long. It says for how long the command may be held while nothing comes. An
	// error ends In, Out or Finish instead.
	Waits() (patience time.Duration, err error)
}

// distance is what a unit has of a distant disk.
type distance struct {
	far   disk.Distant    // nil: the disk is not distant
	near  disk.Disk       // has what is at hand
	ended context.Context // has ended
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
		stored = max(stored, n) // by any of several tries
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

// lock waits for the ranges of t.hold. Whoever has them may wait for content, and nobody should
// wait for longer because of that than for content.
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

// await makes a call of the distant disk of a unit for the command, and holds the command while the
// content cannot be had.
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

// wait holds the command while f does, whose context ends when the command is aborted, the unit
// removed, or the time over. Its error is disk.ErrNotNow only for the last of these.
func (t *Task) wait(u *unit, f func(context.Context) error) error {
	t.waited = true
	ctx, cancel, err := t.patience(u)
	if err != nil {
		return err
	}
	defer cancel()
	t.cancel.Store(&cancel)
	defer t.cancel.Store(nil)
	if t.aborted.Load() { // perhaps before it could be cancelled
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

// notHeld reports whether an error of a method of this file says that the command is not held any
// longer. A write has changed no more then than it says.
func notHeld(err error) bool {
	return errors.Is(err, disk.ErrNotNow) || err == errAborted || err == errLUNNotSupported
}

// patience is for how long the command waits. The time begins anew when content has come, so that a
// long command ends only if nothing comes. What the device does on its own waits for as long as
// there is the unit.
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

// Waiting reports whether the command waits for content that lies far away. Any goroutine may call
// it.
func (t *Task) Waiting() bool { return t.cancel.Load() != nil }

// Waited reports whether the command has done so.
func (t *Task) Waited() bool { return t.waited }
