package disk

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// turnLength is how long a worker goes on while others wait for its place.
	turnLength = 100 * time.Millisecond
	// stallTime is how long one step may take before another worker gets the place: the storage of an image may hang.
	stallTime = 10 * time.Second
)

// turns bounds how many workers of all disks of the process are at work at once, and so the memory that their buffers and the processor
// time that they take together. Who waits has its turn in the order of the calls. Any number of goroutines.
type turns struct {
	places  chan struct{} // one element for each that is free; the runtime serves who waits in order
	stall   time.Duration
	buffers sync.Pool    // *[]byte of hydrationChunk bytes or more
	logged  atomic.Int64 // when one of the disks last told how far it is; nanoseconds since 1970
}

func newTurns(places int) *turns {
	t := &turns{places: make(chan struct{}, places), stall: stallTime}
	for range places {
		t.places <- struct{}{}
	}
	return t
}

var (
	// copyTurns are those of the hydrations. Four more than processors: workers that write, or wait for storage, keep no processor from
	// reading ahead.
	copyTurns = newTurns(max(1, min(runtime.GOMAXPROCS(0)+4, maxCopyBuffers/hydrationChunk)))
	// hashTurns are those of what identifies images. They are others, so that neither of the two waits for the other.
	hashTurns = newTurns(2)
)

// take waits for a place, or returns ctx's error when it ends before.
func (t *turns) take(ctx context.Context) (*turn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case <-t.places:
		return t.begin(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// do calls f when it has its turn, or returns ctx's error when it ends before.
func (t *turns) do(ctx context.Context, f func() error) error {
	turn, err := t.take(ctx)
	if err != nil {
		return err
	}
	defer turn.end()
	return f()
}

// try returns nil where no place is free, as always when somebody waits for one.
func (t *turns) try() *turn {
	select {
	case <-t.places:
		return t.begin()
	default:
		return nil
	}
}

func (t *turns) begin() *turn {
	b := &turn{of: t, until: time.Now().Add(turnLength)}
	b.watchdog = time.AfterFunc(t.stall, b.give)
	return b
}

// mayLog reports whether a disk may tell now how far it is: all together do that once in an interval.
func (t *turns) mayLog(now time.Time, interval time.Duration) bool {
	last := t.logged.Load()
	return now.UnixNano()-last >= int64(interval) && t.logged.CompareAndSwap(last, now.UnixNano())
}

// turn is a place that one worker has.
type turn struct {
	of       *turns
	until    time.Time
	given    atomic.Bool
	watchdog *time.Timer
	buf      *[]byte
}

// more reports whether the worker may do another step, for which the place is its own. After false it calls end.
func (b *turn) more() bool {
	return time.Now().Before(b.until) && b.watchdog.Reset(b.of.stall) && !b.given.Load()
}

// buffer returns that many bytes for as long as the turn lasts.
func (b *turn) buffer(size int64) []byte {
	if b.buf == nil || int64(len(*b.buf)) < size {
		b.buf = nil
		if size >= hydrationChunk {
			b.buf, _ = b.of.buffers.Get().(*[]byte)
		}
		if b.buf == nil || int64(len(*b.buf)) < size {
			buf := make([]byte, size)
			b.buf = &buf
		}
	}
	return (*b.buf)[:size]
}

// end gives the place and the buffer back.
func (b *turn) end() {
	b.watchdog.Stop()
	b.give()
	if b.buf != nil && len(*b.buf) >= hydrationChunk {
		b.of.buffers.Put(b.buf)
	}
	b.buf = nil
}

// give gives the place back, once.
func (b *turn) give() {
	if !b.given.Swap(true) {
		b.of.places <- struct{}{}
	}
}
