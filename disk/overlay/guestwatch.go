package overlay

import (
	"sync/atomic"
	"time"
)

const (
	// guestIdle is how long the guest must have done nothing for what goes on beside it to run at
	// full speed.
	guestIdle = 50 * time.Millisecond
	// FirstReads is how long what goes on beside a guest is slow when the disk is ready. Whoever
	// waits for the disk comes at once, and the first reads need processors, too, or they would be
	// answered 5 to 25 ms later.
	FirstReads = 25 * time.Millisecond
	// dutyWhileBusy: beside a guest that does I/O, one worker copies or hashes a chunk and then
	// rests so many times as long.
	dutyWhileBusy = 3
)

// guestWatch tells what goes on beside a guest what that does. The zero value is ready to use; any
// number of goroutines.
type guestWatch struct {
	touched  atomic.Uint64 // calls of the guest so far
	seen     atomic.Uint64 // of these, when active was last asked
	activeAt atomic.Int64  // when the guest was last seen to do something; nanoseconds since 1970
	waiting  atomic.Int32  // calls that wait for an image that is far away

	next   atomic.Uint32
	recent [16]atomic.Int64 // offsets that were read from the image, plus 1; 0: none
}

func (w *guestWatch) touch() { w.touched.Add(1) }

// wait notes that a call of the guest waits, until the function that it returns is called.
func (w *guestWatch) wait() (done func()) {
	w.waiting.Add(1)
	return func() {
		w.touch()
		w.waiting.Add(-1)
	}
}

func (w *guestWatch) missed(off int64) {
	w.recent[w.next.Add(1)%uint32(len(w.recent))].Store(off + 1)
}

// active reports whether the guest did anything lately, or waits for something.
func (w *guestWatch) active() bool {
	now := time.Now().UnixNano()
	if touched := w.touched.Load(); w.seen.Swap(touched) != touched || w.waiting.Load() > 0 {
		w.activeAt.Store(now)
		return true
	}
	return now-w.activeAt.Load() < int64(guestIdle)
}

// rest is how long a worker whose step took so long leaves storage and processors to the guest.
func (w *guestWatch) rest(took time.Duration) time.Duration {
	if !w.active() {
		return 0
	}
	return dutyWhileBusy * took
}

// take returns an offset that was read from the image lately, and forgets it.
func (w *guestWatch) take() (off int64, ok bool) {
	for i := range w.recent {
		if off := w.recent[i].Swap(0); off != 0 {
			return off - 1, true
		}
	}
	return 0, false
}
