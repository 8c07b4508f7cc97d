package rawfile

import (
	"math/bits"
	"sync/atomic"
)

// Regions is a set of regions of a file. Regions are only added, never removed, so a reader needs
// no lock. Any number of goroutines may use it.
type Regions struct {
	region int64           // bytes
	bits   []atomic.Uint64 // a bit for each region
}

// NewRegions returns an empty set for a file of size bytes.
func NewRegions(size, region int64) *Regions {
	regions := (size + region - 1) / region
	return &Regions{region: region, bits: make([]atomic.Uint64, (regions+63)/64)}
}

// Add adds every region that the range touches. The range is not empty.
func (s *Regions) Add(off, length int64) {
	first, last := off/s.region, (off+length-1)/s.region
	for w := first / 64; w <= last/64; w++ {
		if mask := WordMask(w, first, last); s.bits[w].Load()&mask != mask {
			s.bits[w].Or(mask)
		}
	}
}

// touches reports whether the range touches a region of the set. The range is not empty.
func (s *Regions) touches(off, length int64) bool {
	first, last := off/s.region, (off+length-1)/s.region
	for w := first / 64; w <= last/64; w++ {
		if s.bits[w].Load()&WordMask(w, first, last) != 0 {
			return true
		}
	}
	return false
}

// Covers reports whether the whole range lies in regions of the set. The range is not empty.
func (s *Regions) Covers(off, length int64) bool {
	first, last := off/s.region, (off+length-1)/s.region
	for w := first / 64; w <= last/64; w++ {
		if mask := WordMask(w, first, last); s.bits[w].Load()&mask != mask {
			return false
		}
	}
	return true
}

// each calls f for the regions of the set, once for regions side by side in a word. A large empty
// set takes no time. The last range may go past the end of the file.
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
