package rawfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
)

const (
	// holeSize is the granularity at which zeros become holes: the block size of common file
	// systems.
	holeSize = 4 << 10
	// cachedWrite is the size in bytes of one write into the page cache. The kernel makes folios as
	// large as the write. Large folios fill faster while the kernel has to find memory, and slower
	// while memory is free. Later small writes into a large folio are slow, because ext4 goes over
	// every block of it: a write of 4 KiB takes 6 us in a folio of 256 KiB, and 28 us in one of 2
	// MiB.
	cachedWrite = 256 << 10
	// directWrite is the size in bytes of one write past the cache. Storage may turn out to be
	// slow, and each worker has one such write under way.
	directWrite = 1 << 20
	// paceSpan is how many bytes are written in one way before the ways are compared.
	paceSpan = 1 << 20
	// retryAfter bounds the time spent on trials. A slower way is tried again after this many times
	// the time that its last span took.
	retryAfter = 32
	// cacheWorth is how many times faster the way past the page cache must be on a disk that is
	// served. The guest reads fast what is in the cache.
	cacheWorth = 2
)

// zeros is compared with, and written from. Nothing changes it.
var zeros [256 << 10]byte

// Writer writes to a file through the page cache or past it, whichever is faster. The cache is as
// fast as the kernel finds memory, and slower when too much is dirty. In a virtual machine whose
// host has to provide the memory first, finding it takes ten times as long as the copying. Storage
// may be faster than that, or far slower. Any number of goroutines may use a Writer.
type Writer struct {
	cached io.WriterAt
	direct io.WriterAt // past the page cache; nil: no such way
	Places *Places     // nil: nothing is preallocated
	pace   *pace
	// order lets one write at a time into the page cache, or any number past it. The kernel's lock
	// of the file does the same, but its waiters spin and use a core, and their waiting would count
	// as time of the way past the cache.
	order sync.RWMutex
}

// NewWriter returns a Writer that writes to one file in two ways. direct is nil if there is no way
// past the cache. If direct does not work at all, it writes nothing and returns EINVAL; if it does
// not work for a range, it writes nothing and returns errThroughCache.
func NewWriter(cached, direct io.WriterAt) *Writer {
	return &Writer{cached: cached, direct: direct, pace: newPace(direct != nil)}
}

// ServedWorth is the weight of the speed past the page cache on a disk that is served. The speed
// through the cache has weight 1. See cacheWorth.
const ServedWorth = 1. / cacheWorth

// NewServedWriter is NewWriter for the file of a disk that is served meanwhile: its guest writes
// small pieces later. worth is the weight of the direct way's speed, see ServedWorth.
func NewServedWriter(cached, direct io.WriterAt, places *Places, worth float64) *Writer {
	w := NewWriter(cached, direct)
	w.pace.rates[largeFolios] = 0
	w.pace.worth[pastCache] = worth
	w.Places = places
	return w
}

// ServedWriter is NewServedWriter for this file. It has a way past the page cache if that is safe,
// and preallocates while busy reports false. done closes the writer.
func (f *File) ServedWriter(busy func() bool) (w *Writer, done func()) {
	places, direct := NewPlaces(f.File, busy), f.OpenPastCache()
	cached := disk.WriterAt(context.Background(), f)
	if direct == nil {
		return NewServedWriter(cached, nil, places, ServedWorth), func() {}
	}
	w = NewServedWriter(cached, direct, places, ServedWorth)
	return w, func() { _ = direct.Close() }
}

// Store writes the blocks of p that are not zero into a hole of the file, and leaves the others as
// the hole. It returns how many bytes it has written.
func (w *Writer) Store(p []byte, off int64) (written int64, err error) {
	return dataRuns(p, off, w.Write)
}

// Count returns how many bytes Store would write.
func Count(p []byte, off int64) (written int64, err error) {
	return dataRuns(p, off, func([]byte, int64) error { return nil })
}

// Write writes all of p in the fastest way.
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

// writeCached writes p in pieces of size bytes and returns how much it has written. If another way
// is chosen meanwhile and must is not set, it stops early without an error. No other worker writes
// between two pieces: waking one takes about as long as a write.
func (w *Writer) writeCached(way int, p []byte, off int64, size int, must bool) (n int, err error) {
	w.order.Lock()
	// Let the next worker go on at once, on this processor. The other processors are busy with
	// workers that read ahead, and nobody would write until they are back from the kernel.
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

// writeDirect returns 0 bytes and no error if the direct way does not work, or if another way is
// chosen meanwhile.
func (w *Writer) writeDirect(p []byte, off int64) (int, error) {
	n, err := w.tryDirect(p, off)
	switch {
	case errors.Is(err, errThroughCache):
		return len(p), w.WriteThrough(p, off)
	case errors.Is(err, unix.EINVAL):
		w.pace.exclude(pastCache) // storage needs another alignment
		return 0, nil
	}
	return n, err
}

// tryDirect lets only one write at a time go to storage until the speed of storage is known. Many
// writes at once could take long.
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

// The ways to write a file: through the page cache in writes of cachedWrite, through it in one
// write, and past it.
const (
	smallFolios = iota
	largeFolios
	pastCache
	ways
)

// pace chooses the way to write. It measures the speed of the chosen way, and remembers the last
// speed of the others. When another way was faster than the chosen way is now, it chooses that one.
// Now and then it tries a slower way for a span, because that may be fast by now: the kernel no
// longer has to find memory, or nobody else uses the storage any more. Any number of goroutines may
// use it.
type pace struct {
	mu    sync.Mutex
	way   int
	worth [ways]float64 // factor for each rate before it is compared; constant
	// bytes per second; the last span counts half; +Inf: to be tried; 0: excluded
	rates [ways]float64
	retry [ways]time.Time // when a way that was left is tried again

	// of this span: bytes written in the chosen way, and the time in which at least one of these
	// writes was in the kernel
	bytes  int64
	busy   time.Duration
	active int       // writes in the kernel
	since  time.Time // busy counts from here, if active is not 0
}

// newPace begins with the cache, because that is faster for small files.
func newPace(direct bool) *pace {
	p := &pace{worth: [ways]float64{1, 1, 1},
		rates: [ways]float64{math.Inf(1), math.Inf(1), math.Inf(1)}}
	if !direct {
		p.rates[pastCache] = 0
	}
	return p
}

// choice returns the way to write next.
func (p *pace) choice() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.way
}

// exclude removes a way that does not work.
func (p *pace) exclude(way int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rates[way] = 0
	p.choose()
}

// trying reports whether the chosen way is on trial.
func (p *pace) trying() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return math.IsInf(p.rates[p.way], 1)
}

// begin notes that a write enters the kernel. All writes in the kernel at one time go the same way.
func (p *pace) begin(way int, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active > 0 && way == p.way {
		p.busy += now.Sub(p.since)
	}
	p.active++
	p.since = now
}

// end notes that a write of n bytes has left the kernel. A write that began before the way was
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

// choose begins a span in the fastest way. p.mu is held.
func (p *pace) choose() {
	for way, rate := range p.rates {
		if rate*p.worth[way] > p.rates[p.way]*p.worth[p.way] {
			p.way = way
		}
	}
	p.bytes, p.busy = 0, 0
}

// dataRuns calls f for each run of blocks that are not zero. It returns the sum of their bytes.
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

// LeadingRun returns the length of the run at the beginning of p, and whether its blocks are zero
// or not. p lies at off in the file.
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

// AllZero reports whether p is all zeros. p has at most 256 KiB. The first word is looked at first:
// it decides for most blocks.
func AllZero(p []byte) bool {
	if len(p) >= 8 && binary.NativeEndian.Uint64(p) != 0 {
		return false
	}
	return bytes.Equal(p, zeros[:len(p)])
}

// preallocateFrom is the smallest range in bytes that is worth a system call of its own.
const preallocateFrom = 256 << 10

// Places preallocates ranges of a file before they are written through the page cache. For a write,
// ext4 reserves space block by block, which is two fifths of the cost of filling a new file. File
// systems that reserve once per write gain nothing. A nil Places does nothing. Any number of
// goroutines may use it.
type Places struct {
	file    *os.File
	busy    func() bool // a guest is active, and must not wait for the journal; nil: no guest
	useless atomic.Bool // the file cannot be preallocated, for example because it has no extents
}

// NewPlaces returns nil if preallocating does not help.
func NewPlaces(f *os.File, busy func() bool) *Places {
	if fileSystem(f) != unix.EXT4_SUPER_MAGIC {
		return nil
	}
	return &Places{file: f, busy: busy}
}

// before is called before a range that reads as zeros is written. Afterwards the range still reads
// as zeros. Errors are ignored, because the write has the same ones.
func (p *Places) before(off, length int64) {
	if p == nil || length < preallocateFrom || p.useless.Load() || p.busy != nil && p.busy() {
		return
	}
	err := osfile.Call(p.file, func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, off, length)
	})
	if err != nil && !disk.IsNoSpace(err) {
		p.useless.Store(true)
	}
}
