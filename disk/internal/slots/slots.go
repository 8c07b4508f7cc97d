package slots

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// slotLength is how long a worker keeps its slot before others have their turn.
	slotLength = 100 * time.Millisecond
	// stallTime is how long a step may take before another worker gets the slot. The storage of an
	// image may hang.
	stallTime = 10 * time.Second
)

// Options are the options of Slots. The zero value works.
type Options struct {
	// Buffer is the smallest size in bytes of buffers that are kept for the next worker. Smaller
	// ones are allocated each time. 0: none is kept.
	Buffer int64
	// Stall is how long one step may take before the slot goes to another worker. 0: 10 seconds.
	Stall time.Duration
}

// Slots is a number of slots that workers share. Waiters are served first in, first out. Any number
// of goroutines may use it.
type Slots struct {
	opt     Options
	free    chan struct{} // one element for each free slot; the runtime serves waiters in order
	buffers sync.Pool     // *[]byte of opt.Buffer bytes or more
	logged  atomic.Int64  // when a worker last logged its progress; nanoseconds since 1970
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

// Free is how many slots are free.
func (s *Slots) Free() int { return len(s.free) }

// Acquire waits for a slot. If ctx ends first, it returns the error of ctx.
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

// TryAcquire returns nil if no slot is free. None is free while a caller waits for one.
func (s *Slots) TryAcquire() *Slot {
	select {
	case <-s.free:
		return s.begin()
	default:
		return nil
	}
}

// Do calls f with a slot. If ctx ends before there is one, it returns the error of ctx.
func (s *Slots) Do(ctx context.Context, f func() error) error {
	slot, err := s.Acquire(ctx)
	if err != nil {
		return err
	}
	defer slot.Release()
	return f()
}

// MayLog reports whether a worker may log its progress now. All workers together do so once per
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

// Slot is one worker's slot from Acquire to Release. Only that worker may call its methods.
type Slot struct {
	of       *Slots
	until    time.Time
	given    atomic.Bool
	watchdog *time.Timer
	buf      *[]byte
}

// More reports whether the worker may do another step. If not, the worker must release the slot.
func (b *Slot) More() bool {
	return time.Now().Before(b.until) && b.watchdog.Reset(b.of.opt.Stall) && !b.given.Load()
}

// Buffer returns a buffer of size bytes. The worker may use it until Release.
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

// give gives the slot back. Calls after the first do nothing.
func (b *Slot) give() {
	if !b.given.Swap(true) {
		b.of.free <- struct{}{}
	}
}

// Rest waits for the time d. The worker must have released its slot. If ctx ends first, Rest
// returns the error of ctx.
func Rest(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
