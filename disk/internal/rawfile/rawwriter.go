package rawfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// holeSize is the granularity at which zeros become holes: the block size of the usual file
	// systems.
	holeSize = 4 << 10
	// cachedWrite is what is written into the page cache at once, as kernels make folios as large
	// as the write. Larger ones are faster to fill where memory has to be found, and slower where
	// it is at hand. Later small writes to them are slower: ext4 goes over every block of a folio
	// for each, which makes a write of 4 KiB take 6 us in one of 256 KiB, and 28 us in one of 2
	// MiB. Bytes.
	cachedWrite = 256 << 10
	// directWrite is what is written past the cache at once: storage may turn out to be slow, and
	// each worker has one under way. Bytes.
	directWrite = 1 << 20
	// paceSpan is how much is written in one way before its speed is compared with the others'.
	// Bytes.
	paceSpan = 1 << 20
	// retryAfter is how many times as long as its last span took a way that was slower is left
	// alone: so little time goes into trials.
	retryAfter = 32
	// cacheWorth is how many times as fast a way past the page cache has to be for a disk that is
	// served: what is in the cache the guest need not wait for.
	cacheWorth = 2
)

// zeros is compared with and written from; nothing writes to it.
var zeros [256 << 10]byte

// Writer writes to a file through the page cache or past it, as is faster: the cache is bound by
// how soon the kernel finds memory, which takes ten times as long as copying where the host of a
// virtual machine has to give it first, and by how much may be dirty; storage may be faster than
// that, or slower by far. Any number of goroutines.
type Writer struct {
	cached io.WriterAt
	direct io.WriterAt // past the page cache; nil: no such way
	Places *Places     // nil: nothing has its place before
	pace   *pace
	// order lets one write at a time into the page cache, or any number past it. The kernel's lock
	// of the file does the same, but there writers wait by spinning, at the cost of a core, and
	// what they wait would count as the time of their own way.
	order sync.RWMutex
}

// NewWriter writes by either of two ways to the same file. The direct one, nil if there is none,
// returns EINVAL where it does not work, and errThroughCache where it does not for this range; it
// has written nothing then.
func NewWriter(cached, direct io.WriterAt) *Writer {
	return &Writer{cached: cached, direct: direct, pace: newPace(direct != nil)}
}

// ServedWorth is what the speed past the page cache counts for a disk that is served, to that
// through it: what is in the cache the guest need not wait for.
const ServedWorth = 1. / cacheWorth

// NewServedWriter is NewWriter for the file of a disk that is served meanwhile, and that the guest
// writes to in small pieces later. worth is what the speed of the direct way counts to that of the
// others, see ServedWorth.
func NewServedWriter(cached, direct io.WriterAt, places *Places, worth float64) *Writer {
	w := NewWriter(cached, direct)
	w.pace.rates[largeFolios] = 0
	w.pace.worth[pastCache] = worth
	w.Places = places
	return w
}

// ServedWriter is NewServedWriter with what this file has: a way past the page cache, and places,
// unless busy says that the guest does something. done closes it.
func (f *File) ServedWriter(busy func() bool) (w *Writer, done func()) {
	places, direct := NewPlaces(f.File, busy), f.OpenPastCache()
	if direct == nil {
		return NewServedWriter(f, nil, places, ServedWorth), func() {}
	}
	w = NewServedWriter(f, direct, places, ServedWorth)
	return w, func() { _ = direct.Close() }
}

// Store writes what is not zero of p, by blocks of the file system, into a file that is a hole
// there: zeros stay one. It returns how many bytes it has written.
func (w *Writer) Store(p []byte, off int64) (written int64, err error) {
	return dataRuns(p, off, w.Write)
}

// Count only tells how many bytes store would write.
func Count(p []byte, off int64) (written int64, err error) {
	return dataRuns(p, off, func([]byte, int64) error { return nil })
}

// Write writes all of p in the way that is fastest.
func (w *Writer) Write(p []byte, off int64) error {
	if off%holeSize != 0 || len(p)%holeSize != 0 {
		return w.WriteThrough(p, off)
	}
	for len(p) > 0 {
		var n int
		var err error
		switch w.pace.choice() {
		case smallFolios:
			n, err = w.writeCached(smallFolios, p, off, cachedWrite, false)
		case largeFolios:
			n, err = w.writeCached(largeFolios, p, off, len(p), false)
		case pastCache:
			n, err = w.writeDirect(p[:min(len(p), directWrite)], off)
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// WriteThrough writes all of p through the cache.
func (w *Writer) WriteThrough(p []byte, off int64) error {
	_, err := w.writeCached(smallFolios, p, off, cachedWrite, true)
	return err
}

// writeCached writes p, so many bytes at once, and returns how much it has written. That is less
// than all of it, and no error, where another way is to be taken by now, unless this one must be.
// Between two of its writes it lets no other worker in: to wake one takes about as long as a write.
func (w *Writer) writeCached(way int, p []byte, off int64, size int, must bool) (n int, err error) {
	w.order.Lock()
	// Who was woken goes on at once, on this processor: the others are with workers that read
	// ahead, and nobody would write until those are back from the kernel.
	defer runtime.Gosched()
	defer w.order.Unlock()
	for n < len(p) && err == nil && (must || w.pace.choice() == way) {
		var m int
		w.pace.begin(way, time.Now())
		if n == 0 {
			w.Places.before(off, int64(len(p)))
		}
		m, err = w.cached.WriteAt(p[n:min(n+size, len(p))], off+int64(n))
		w.pace.end(way, int64(m), time.Now())
		n += m
	}
	return n, err
}

// writeDirect returns 0 bytes and no error where that does not work, or another way is to be taken
// by now.
func (w *Writer) writeDirect(p []byte, off int64) (int, error) {
	n, err := w.tryDirect(p, off)
	switch {
	case errors.Is(err, errThroughCache):
		return len(p), w.WriteThrough(p, off)
	case errors.Is(err, unix.EINVAL):
		w.pace.exclude(pastCache) // the storage wants another alignment
		return 0, nil
	}
	return n, err
}

// tryDirect lets one write at a time go to the storage until it is known how fast that is: many
// could take long.
func (w *Writer) tryDirect(p []byte, off int64) (int, error) {
	if w.pace.trying() {
		w.order.Lock()
		defer w.order.Unlock()
	} else {
		w.order.RLock()
		defer w.order.RUnlock()
	}
	if w.pace.choice() != pastCache {
		return 0, nil
	}
	w.pace.begin(pastCache, time.Now())
	n, err := w.direct.WriteAt(p, off)
	w.pace.end(pastCache, int64(n), time.Now())
	return n, err
}

// The ways to write a file: through the page cache in writes of cachedWrite, or in whole; or past
// it.
const (
	smallFolios = iota
	largeFolios
	pastCache
	ways
)

// pace chooses the way to write by what each achieved lately. The fastest one is left as soon as it
// is slower than another one was. The others get a span now and then: what made them slow, memory
// that had to be found or another user of the storage, may be over. Any number of goroutines.
type pace struct {
	mu    sync.Mutex
	way   int
	worth [ways]float64 // what a rate is multiplied with before it is compared; not changed later
	// bytes per second, a mean of which half is the last span; +Inf: to be tried; 0: excluded
	rates [ways]float64
	retry [ways]time.Time // when one that was left is tried again

	// This span: what was written the chosen way, and how long at least one such write was in the
	// kernel.
	bytes  int64
	busy   time.Duration
	active int       // writes in the kernel
	since  time.Time // busy counts from here, if active is not 0
}

// newPace begins through the cache, which is faster for what is small.
func newPace(direct bool) *pace {
	p := &pace{worth: [ways]float64{1, 1, 1},
		rates: [ways]float64{math.Inf(1), math.Inf(1), math.Inf(1)}}
	if !direct {
		p.rates[pastCache] = 0
	}
	return p
}

// choice is the way to write next.
func (p *pace) choice() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.way
}

// exclude is for a way that turned out not to work.
func (p *pace) exclude(way int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rates[way] = 0
	p.choose()
}

// trying says that the way is chosen to see how fast it is.
func (p *pace) trying() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return math.IsInf(p.rates[p.way], 1)
}

// begin notes that a write enters the kernel. At any time all that are there go the same way.
func (p *pace) begin(way int, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active > 0 && way == p.way {
		p.busy += now.Sub(p.since)
	}
	p.active++
	p.since = now
}

// end notes that a write has left the kernel, with n bytes. What was begun before the way was
// changed does not count.
func (p *pace) end(way int, n int64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active--
	if way != p.way {
		return
	}
	p.busy += now.Sub(p.since)
	p.since = now
	p.bytes += n
	if p.bytes < paceSpan {
		return
	}
	rate := float64(p.bytes) / max(p.busy, time.Nanosecond).Seconds()
	if !math.IsInf(p.rates[way], 1) {
		rate = (rate + p.rates[way]) / 2
	}
	p.rates[way] = rate
	p.retry[way] = now.Add(retryAfter * p.busy)
	for other := range p.rates {
		if other != way && p.rates[other] > 0 && !now.Before(p.retry[other]) {
			p.rates[other] = math.Inf(1)
		}
	}
	p.choose()
}

// choose begins a span, in the way that is fastest. p.mu is held.
func (p *pace) choose() {
	for way, rate := range p.rates {
		if rate*p.worth[way] > p.rates[p.way]*p.worth[p.way] {
			p.way = way
		}
	}
	p.bytes, p.busy = 0, 0
}

// dataRuns calls f for each run of blocks that are not zero. It returns how many bytes f has done.
func dataRuns(p []byte, off int64, f func(p []byte, off int64) error) (done int64, err error) {
	for len(p) > 0 {
		zero, n := LeadingRun(p, off)
		if !zero {
			if err := f(p[:n], off); err != nil {
				return done, err
			}
			done += int64(n)
		}
		p, off = p[n:], off+int64(n)
	}
	return done, nil
}

// LeadingRun is how much of p, which is at off in the file, consists of zero blocks only, or of
// other blocks only.
func LeadingRun(p []byte, off int64) (zero bool, n int) {
	for n < len(p) {
		block := min(len(p)-n, holeSize-int((off+int64(n))%holeSize))
		isZero := AllZero(p[n : n+block])
		if n > 0 && isZero != zero {
			break
		}
		zero = isZero
		n += block
	}
	return zero, n
}

// AllZero reports whether p, at most holeSize bytes, is all zeros. Most blocks show in their first
// word that they are not.
func AllZero(p []byte) bool {
	if len(p) >= 8 && binary.NativeEndian.Uint64(p) != 0 {
		return false
	}
	return bytes.Equal(p, zeros[:len(p)])
}
