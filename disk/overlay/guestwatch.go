package overlay

import (
	"sync/atomic"
	"time"
)

const (
	// guestIdle is how long the guest must be idle before background work runs at full speed.
	guestIdle = 50 * time.Millisecond
	// FirstReads is how long background work is slow after the disk becomes ready. Initiators come
	// at once, and their first reads need processors, too. They would take 5 to 25 ms longer.
	FirstReads = 25 * time.Millisecond
	// dutyWhileBusy is how many times the time of its last step a worker rests while the guest is
	// active.
	dutyWhileBusy = 3
)

// guestWatch tells background work whether the guest is active. The zero value is ready to use. Any
// number of goroutines may use it.
type guestWatch struct {
	touched  atomic.Uint64 // calls of the guest so far
	seen     atomic.Uint64 // the value of touched when active was last called
	activeAt atomic.Int64  // when the guest was last seen active; nanoseconds since 1970
	waiting  atomic.Int32  // calls that wait for a far image

	next   atomic.Uint32
	recent [16]atomic.Int64 // offsets of recent reads from the image, plus 1; 0: none
}

func (w *guestWatch) touch() { w.touched.Add(1) }

// wait records that a call of the guest waits, until done is called.
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

// active reports whether the guest was active recently, or waits for something.
func (w *guestWatch) active() bool {
	now := time.Now().UnixNano()
	if touched := w.touched.Load(); w.seen.Swap(touched) != touched || w.waiting.Load() > 0 {
		w.activeAt.Store(now)
		return true
	}
	idle := now - w.activeAt.Load()
	return idle >= 0 && idle < int64(guestIdle) // the clock may have been set back
}

// rest returns how long a worker leaves storage and processors to the guest after a step that took
// took.
func (w *guestWatch) rest(took time.Duration) time.Duration {
	if !w.active() {
		return 0
	}
	return dutyWhileBusy * took
}

// take returns the offset of a recent read from the image, and forgets it.
func (w *guestWatch) take() (off int64, ok bool) {
	for i := range w.recent {
		if off := w.recent[i].Swap(0); off != 0 {
			return off - 1, true
		}
	}
	return 0, false
}
