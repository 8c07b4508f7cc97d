package serving

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
)

// Content of a disk may be far away. A request that needs it is held until the content is there,
// the request is aborted, or nothing has come for so long that the front end gives up. Then the
// call ends with disk.ErrNotNow, and the peer should try again: nothing is lost.
//
// Requests read and write content only by the methods of this file. For a near disk these are plain
// calls. For a far one (disk.Far), a method first asks for what is at hand. If that is not enough,
// it tells the front end that the request waits, and calls again with a context that can end the
// wait.

// A disk may return ErrNotNow before the time is over. A peer that got each of these answers would
// soon have used up its attempts: QEMU has eight. So the request is still held, and the call is
// repeated after a pause that grows from firstPause to longestPause.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
)

var (
	// ErrAborted ends an aborted request. It is never an answer to a peer.
	ErrAborted = errors.New("the request was aborted")
	// ErrRemoved ends a request to a removed disk.
	ErrRemoved = errors.New("the disk was removed")
)

// Executor is a goroutine that executes requests of a front end.
type Executor interface {
	// Waits is called by that goroutine before it waits for far content, which may take long. It
	// returns how long the request may be held while nothing comes. An error ends the call.
	Waits() (timeout time.Duration, err error)
	// Blocks is called by that goroutine before it waits for local storage, which has begun to
	// read. So the front end can go on with other requests meanwhile. An error ends the call.
	Blocks() error
	// Blocked is called after that wait.
	Blocked(took time.Duration)
	// Client is the client whose requests it executes, or nil.
	Client() *Client
}

// Request is one request of a peer while it uses disks, or background work. The zero value is ready
// to use. Its methods are not for concurrent use, unless they say so.
type Request struct {
	// Executor is the goroutine that makes the calls; nil: the request may be held for ever.
	Executor Executor
	// Context ends the waits of a request without an Executor; nil: only the disk's removal does.
	Context context.Context
	// Hold are the ranges that the request holds: see Lock.
	Hold rangelock.Hold

	aborted atomic.Bool
	waited  bool
	since   time.Time                          // when the request began to wait; zero: it has not
	cancel  atomic.Pointer[context.CancelFunc] // ends the present wait; nil: there is none
}

// Abort says that nobody wants the result of the request any more. A long request stops at its next
// step. Any goroutine may call it.
func (r *Request) Abort() {
	r.aborted.Store(true)
	if cancel := r.cancel.Load(); cancel != nil {
		(*cancel)()
	}
}

// Aborted reports whether Abort was called. Any goroutine may call it.
func (r *Request) Aborted() bool { return r.aborted.Load() }

// Waiting reports whether the request waits for far content. Any goroutine may call it.
func (r *Request) Waiting() bool { return r.cancel.Load() != nil }

// Waited reports whether the request has ever waited for far content.
func (r *Request) Waited() bool { return r.waited }

// Wanted returns ErrAborted or ErrRemoved once the request is aborted or the disk removed. Code
// with many disk calls calls it before each of them.
func (r *Request) Wanted(d *Disk) error {
	if r.aborted.Load() {
		return ErrAborted
	}
	if d.Removed() {
		return ErrRemoved
	}
	return nil
}

// Moved says that content has come: the hold timeout begins again.
func (r *Request) Moved(d *Disk) {
	if d.far {
		r.since = time.Time{}
	}
}

// Steps calls f for each part of a long range, from off to end, in order, so that shorter requests
// can come in between. A part has at most most bytes. Before each part, it calls permitted, and
// ends if that returns an error.
func (r *Request) Steps(d *Disk, off, end, most int64, permitted func() error,
	f func(off, n int64) error) error {
	for off < end {
		if err := permitted(); err != nil {
			return err
		}
		n := min(end-off, most)
		if err := f(off, n); err != nil {
			return err
		}
		r.Moved(d)
		off += n
		runtime.Gosched()
	}
	return nil
}

// ReadAt calls disk.Disk.ReadAt.
func (r *Request) ReadAt(d *Disk, p []byte, off int64) (n int, err error) {
	if !d.far {
		return r.readNear(d, p, off, false)
	}
	err = r.await(d, func(ctx context.Context) (err error) {
		n, err = d.Disk.ReadAt(ctx, p, off)
		return err
	})
	return n, err
}

// readNear reads from a disk of this machine. With whole, it sees no change half done.
func (r *Request) readNear(d *Disk, p []byte, off int64, whole bool) (n int, err error) {
	if r.Executor == nil {
		return r.call(context.Background(), d, p, off, whole)
	}
	n, err = r.call(disk.Cached, d, p, off, whole)
	if err == nil || !errors.Is(err, disk.ErrNotNow) {
		return n, err
	}
	// Blocks may wait until the peer takes answers, so no change waits for it.
	if err := r.Executor.Blocks(); err != nil {
		return 0, err
	}
	begun := time.Now()
	n, err = r.call(context.Background(), d, p, off, whole)
	r.Executor.Blocked(time.Since(begun))
	return n, err
}

func (r *Request) call(ctx context.Context, d *Disk, p []byte, off int64, whole bool) (int, error) {
	if whole {
		placed := d.Ranges.EnterRead(&r.Hold, "", off, int64(len(p)))
		defer d.Ranges.LeaveRead(&r.Hold, placed) // even if the disk panics: others go on
	}
	return d.Disk.ReadAt(ctx, p, off)
}

// Read is ReadWhole for a front end whose protocol has no changes of several steps. On an exclusive
// disk it need not exclude such changes: the one peer makes them by the protocol that it reads by.
func (r *Request) Read(d *Disk, p []byte, off int64) (int, error) {
	if d.exclusive.Load() || d.protected.Load() {
		return r.ReadAt(d, p, off)
	}
	return r.ReadWhole(d, p, off)
}

// ReadWhole is ReadAt, but sees no change half done whose range is held exclusively. On a far disk
// the read may wait long, so there only changes of its range wait for it.
func (r *Request) ReadWhole(d *Disk, p []byte, off int64) (int, error) {
	if !d.far {
		return r.readNear(d, p, off, true)
	}
	r.Hold.Set(rangelock.Read, "", off, int64(len(p)))
	if err := r.Lock(d); err != nil {
		return 0, err
	}
	defer d.Ranges.Unlock(&r.Hold)
	return r.ReadAt(d, p, off)
}

// WriteAt calls disk.Disk.WriteAt. It returns the largest number of bytes that an attempt has
// stored.
func (r *Request) WriteAt(d *Disk, p []byte, off int64) (stored int, err error) {
	if !d.far {
		return d.Disk.WriteAt(context.Background(), p, off)
	}
	err = r.await(d, func(ctx context.Context) error {
		n, err := d.Disk.WriteAt(ctx, p, off)
		stored = max(stored, n)
		return err
	})
	return stored, err
}

// Discard calls disk.Discarder.Discard.
func (r *Request) Discard(d *Disk, off, length int64) error {
	if !d.far {
		return d.Discards.Discard(context.Background(), off, length)
	}
	return r.await(d, func(ctx context.Context) error {
		return d.Discards.Discard(ctx, off, length)
	})
}

// Zero calls disk.Zeroer.Zero.
func (r *Request) Zero(d *Disk, off, length int64) error {
	if !d.far {
		return d.Zeroes.Zero(context.Background(), off, length)
	}
	return r.await(d, func(ctx context.Context) error { return d.Zeroes.Zero(ctx, off, length) })
}

// Extent calls disk.Extenter.Extent.
func (r *Request) Extent(d *Disk, off, length int64) (e disk.Extent, err error) {
	if !d.far {
		return d.Extents.Extent(context.Background(), off, length)
	}
	err = r.await(d, func(ctx context.Context) (err error) {
		e, err = d.Extents.Extent(ctx, off, length)
		return err
	})
	return e, err
}

// Depth calls disk.Layered.Depth.
func (r *Request) Depth(d *Disk, off, length int64) (depth int, n int64, err error) {
	if !d.far {
		return d.Layers.Depth(context.Background(), off, length)
	}
	err = r.await(d, func(ctx context.Context) (err error) {
		depth, n, err = d.Layers.Depth(ctx, off, length)
		return err
	})
	return depth, n, err
}

// Lock waits for the ranges of r.Hold, which the caller unlocks. Their holder may wait for far
// content, so Lock has the same time limit as content. After an error nothing is held. A request
// that changes the disk must call Wanted after Lock: another peer may know that the request was
// aborted, and may have written the same range.
func (r *Request) Lock(d *Disk) error {
	if !d.far {
		d.Ranges.Lock(&r.Hold)
		return nil
	}
	if d.Ranges.LockContext(disk.AtHand, &r.Hold) == nil {
		return nil
	}
	return r.wait(d, func(ctx context.Context) error {
		if d.Ranges.LockContext(ctx, &r.Hold) != nil {
			return disk.ErrNotNow
		}
		return nil
	})
}

// await makes a call to a far disk, and holds the request while the content is not there.
func (r *Request) await(d *Disk, call func(context.Context) error) error {
	if err := call(disk.AtHand); err == nil || !errors.Is(err, disk.ErrNotNow) {
		return err
	}
	return r.wait(d, func(ctx context.Context) error {
		for pause := firstPause; ; pause = min(2*pause, longestPause) {
			err := call(ctx)
			if !errors.Is(err, disk.ErrNotNow) {
				r.since = time.Time{}
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

// wait holds the request while f runs. The context of f ends when the request is aborted, the disk
// is removed, or the time is over. Only in the last case is the error disk.ErrNotNow.
func (r *Request) wait(d *Disk, f func(context.Context) error) error {
	r.waited = true
	ctx, cancel, err := r.timeout(d)
	if err != nil {
		return err
	}
	defer cancel()
	r.cancel.Store(&cancel)
	defer r.cancel.Store(nil)
	if r.aborted.Load() { // possibly before r.cancel was set
		return ErrAborted
	}
	var client *Client
	if r.Executor != nil {
		client = r.Executor.Client()
	}
	var w wait
	w.begin(d, client, true)
	err = f(ctx)
	w.end(!errors.Is(err, disk.ErrNotNow))
	if !errors.Is(err, disk.ErrNotNow) {
		return err
	}
	if unwanted := r.Wanted(d); unwanted != nil {
		return unwanted
	}
	return err
}

// NotHeld reports whether one of these methods has failed because the request is no longer held. A
// write has then changed only as many bytes as it returned.
func NotHeld(err error) bool {
	return errors.Is(err, disk.ErrNotNow) || err == ErrAborted || err == ErrRemoved
}

// timeout returns a context that limits how long the request waits. The time begins again whenever
// content has come, so a long request ends only if nothing comes.
func (r *Request) timeout(d *Disk) (context.Context, context.CancelFunc, error) {
	if r.Executor == nil {
		ctx, cancel := context.WithCancel(d.ctx)
		if r.Context == nil {
			return ctx, cancel, nil
		}
		stop := context.AfterFunc(r.Context, cancel)
		return ctx, func() { stop(); cancel() }, nil
	}
	timeout, err := r.Executor.Waits()
	if err != nil {
		return nil, nil, err
	}
	if r.since.IsZero() {
		r.since = time.Now()
	}
	ctx, cancel := context.WithDeadline(d.ctx, r.since.Add(timeout))
	return ctx, cancel, nil
}
