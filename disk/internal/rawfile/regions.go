package rawfile

import (
	"context"
	"math/bits"
	"sync/atomic"

	"kubevirt.io/disk/disk"
)

// Regions is a set of regions of a file. Readers need no lock. Any number of goroutines may use it.
// Regions are never removed, except by a Trail.
type Regions struct {
	region int64                   // bytes
	bits   []atomic.Uint64         // a bit for each region
	next   atomic.Pointer[Regions] // continues bits after the file has grown; nil: there is no more
}

// NewRegions returns an empty set for a file of size bytes.
func NewRegions(size, region int64) *Regions {
	regions := (size + region - 1) / region
	return &Regions{region: region, bits: make([]atomic.Uint64, (regions+63)/64)}
}

// grow extends the set for a file that will have size bytes. Nobody uses the new part before grow
// returns. One call at a time.
func (s *Regions) grow(size int64) {
	last, words := s, int64(len(s.bits))
	for next := s.next.Load(); next != nil; next = next.next.Load() {
		last, words = next, words+int64(len(next.bits))
	}
	missing := ((size+s.region-1)/s.region+63)/64 - words
	if missing <= 0 {
		return
	}
	// The set grows by at least half, so that a file that grows often makes no long chain.
	more := &Regions{region: s.region, bits: make([]atomic.Uint64, max(missing, words/2))}
	last.next.Store(more)
}

// word returns the word with that index, counted through the chain.
func (s *Regions) word(w int64) *atomic.Uint64 {
	for w >= int64(len(s.bits)) {
		w -= int64(len(s.bits))
		s = s.next.Load()
	}
	return &s.bits[w]
}

// Add adds every region that the range touches. The range is not empty.
func (s *Regions) Add(off, length int64) {
	first, last := off/s.region, (off+length-1)/s.region
	for w := first / 64; w <= last/64; w++ {
		word, mask := s.word(w), WordMask(w, first, last)
		if word.Load()&mask != mask {
			word.Or(mask)
		}
	}
}

// drop removes every region that the range touches. The range is not empty.
func (s *Regions) drop(off, length int64) {
	first, last := off/s.region, (off+length-1)/s.region
	for w := first / 64; w <= last/64; w++ {
		s.word(w).And(^WordMask(w, first, last))
	}
}

// bytes returns how many bytes of the range lie in regions of the set. The range is not empty. It
// lies in one region, or it begins and ends with regions or at the end of the file.
func (s *Regions) bytes(off, length int64) int64 {
	first, last := off/s.region, (off+length-1)/s.region
	n := 0
	for w := first / 64; w <= last/64; w++ {
		n += bits.OnesCount64(s.word(w).Load() & WordMask(w, first, last))
	}
	return min(int64(n)*s.region, length)
}

// touches reports whether the range touches a region of the set. The range is not empty.
func (s *Regions) touches(off, length int64) bool {
	first, last := off/s.region, (off+length-1)/s.region
	for w := first / 64; w <= last/64; w++ {
		if s.word(w).Load()&WordMask(w, first, last) != 0 {
			return true
		}
	}
	return false
}

// Covers reports whether the whole range lies in regions of the set. The range is not empty.
func (s *Regions) Covers(off, length int64) bool {
	first, last := off/s.region, (off+length-1)/s.region
	for w := first / 64; w <= last/64; w++ {
		if mask := WordMask(w, first, last); s.word(w).Load()&mask != mask {
			return false
		}
	}
	return true
}

// each calls f for the runs of regions in the set. A run ends at the end of a word. A large empty
// set takes no time. The last run may go past the end of the file. The file must not have grown.
func (s *Regions) each(f func(off, length int64)) {
	for w := range s.bits {
		for word := s.bits[w].Load(); word != 0; {
			first := bits.TrailingZeros64(word)
			count := bits.TrailingZeros64(^(word >> first))
			f(int64(w*64+first)*s.region, int64(count)*s.region)
			word &^= (1<<count - 1) << first
		}
	}
}

// WordMask returns the bits of the blocks first to last in the word with that index.
func WordMask(index, first, last int64) uint64 {
	mask := ^uint64(0)
	if index == first/64 {
		mask &= ^uint64(0) << (first % 64)
	}
	if index == last/64 {
		mask &= ^uint64(0) >> (63 - last%64)
	}
	return mask
}

const (
	// holeRegion is the granularity in bytes at which holes are remembered. A file of 16 TiB takes
	// 2 MiB of memory. The regions of a small file are smaller, for the map that people see.
	holeRegion = 1 << 20
	// minHoleRegion is the hole region of small files, which may grow.
	minHoleRegion = 64 << 10
	// maxHoleExtents is how many extents of a file are looked at when it is opened. Everything
	// behind them counts as written.
	maxHoleExtents = 4096
)

// holeMap knows the regions of a file that were never written. Reads of them return zeros and do
// not ask the kernel, which would fill its page cache with a whole read-ahead of zeros for each
// read. A nil map knows nothing.
type holeMap struct {
	written *Regions
}

// newHoleMap asks a disk where its holes are. Nobody else may change the disk from then on.
func newHoleMap(d interface {
	disk.Disk
	disk.Extenter
}) *holeMap {
	size := d.Size()
	h := &holeMap{written: NewRegions(size,
		min(holeRegion, max(minHoleRegion, disk.MapCellBytes(size))))}
	for off, extents := int64(0), 0; off < size; extents++ {
		e, err := d.Extent(context.Background(), off, size-off)
		if err != nil || extents == maxHoleExtents {
			h.note(off, size-off)
			break
		}
		if e.Data {
			h.note(off, e.Length)
		}
		off += e.Length
	}
	return h
}

// note marks a range that is about to be written.
func (h *holeMap) note(off, length int64) {
	if h != nil && length > 0 {
		h.written.Add(off, length)
	}
}

// empty reports whether the range was never written.
func (h *holeMap) empty(off, length int64) bool {
	return h != nil && length > 0 && !h.written.touches(off, length)
}
