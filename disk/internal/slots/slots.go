package slots

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// slotLength is how long a worker goes on while others wait for its slot.
	slotLength = 100 * time.Millisecond
	// stallTime is how long one step may take before another worker gets the slot: the storage of
	// an image may hang.
	stallTime = 10 * time.Second
)

// Options of Slots. The zero value works.
type Options struct {
	// Buffer is the size of the buffers that are kept for the next worker, bytes. Smaller ones are
	// made anew. 0: none is kept.
	Buffer int64
	// Stall is how long one step may take before the slot goes to another worker; 0: 10 seconds.
	Stall time.Duration
}

// Slots are what a number of workers share. Waiters are served first in, first out. Any number of
// goroutines.
type Slots struct {
	opt     Options
	free    chan struct{} // one element for each free slot; the runtime serves waiters in order
	buffers sync.Pool     // *[]byte of opt.Buffer bytes or more
	logged  atomic.Int64  // when a worker last told how far it is; nanoseconds since 1970
}

// New makes n slots.
func New(n int, opt Options) *Slots {
	if opt.Stall <= 0 {
		opt.Stall = stallTime
	}
	s := &Slots{opt: opt, free: make(chan struct{}, n)}
	for range n {
		s.free <- struct{}{}
	}
	return s
}

// Count is how many slots there are.
func (s *Slots) Count() int { return cap(s.free) }

// Free is how many of them nobody has.
func (s *Slots) Free() int { return len(s.free) }

// Acquire waits for a slot, or returns ctx's error when it ends before.
func (s *Slots) Acquire(ctx context.Context) (*Slot, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case <-s.free:
		return s.begin(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// TryAcquire returns nil where no slot is free, as always when somebody waits for one.
func (s *Slots) TryAcquire() *Slot {
	select {
	case <-s.free:
		return s.begin()
	default:
		return nil
	}
}

// Do calls f with a slot, or returns ctx's error when it ends before.
func (s *Slots) Do(ctx context.Context, f func() error) error {
	slot, err := s.Acquire(ctx)
	if err != nil {
		return err
	}
	defer slot.Release()
	return f()
}

// MayLog reports whether a worker may tell now how far it is: all together do that once in an
// interval.
func (s *Slots) MayLog(now time.Time, interval time.Duration) bool {
	last := s.logged.Load()
	return now.UnixNano()-last >= int64(interval) && s.logged.CompareAndSwap(last, now.UnixNano())
}

func (s *Slots) begin() *Slot {
	b := &Slot{of: s, until: time.Now().Add(slotLength)}
	b.watchdog = time.AfterFunc(s.opt.Stall, b.give)
	return b
}

// Slot is what one worker has from Acquire to Release. Its methods are for that worker alone.
type Slot struct {
	of       *Slots
	until    time.Time
	given    atomic.Bool
	watchdog *time.Timer
	buf      *[]byte
}

// More reports whether the worker may do another step. After false it releases the slot.
func (b *Slot) More() bool {
	return time.Now().Before(b.until) && b.watchdog.Reset(b.of.opt.Stall) && !b.given.Load()
}

// Buffer returns that many bytes, which are the worker's until Release.
func (b *Slot) Buffer(size int64) []byte {
	if b.buf == nil || int64(len(*b.buf)) < size {
		b.buf = nil
		if b.of.keeps(size) {
			b.buf, _ = b.of.buffers.Get().(*[]byte)
		}
		if b.buf == nil || int64(len(*b.buf)) < size {
			buf := make([]byte, size)
			b.buf = &buf
		}
	}
	return (*b.buf)[:size]
}

// keeps reports whether a buffer of that size is kept for the next worker.
func (s *Slots) keeps(size int64) bool { return s.opt.Buffer > 0 && size >= s.opt.Buffer }

// Release gives the slot and the buffer back. Calls after the first do nothing.
func (b *Slot) Release() {
	b.watchdog.Stop()
	b.give()
	if b.buf != nil && b.of.keeps(int64(len(*b.buf))) {
		b.of.buffers.Put(b.buf)
	}
	b.buf = nil
}

// give gives the slot back, once.
func (b *Slot) give() {
	if !b.given.Swap(true) {
		b.of.free <- struct{}{}
	}
}

// Rest waits without a slot, or returns ctx's error when it ends before.
func Rest(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
