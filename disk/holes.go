package disk

import "sync/atomic"

const (
	// holeRegion is how finely a file's holes are remembered, bytes: 2 MiB of memory for 16 TiB.
	holeRegion = 1 << 20
	// maxHoleExtents bounds how many extents of a file are asked for when it is opened; what lies behind them counts as written.
	maxHoleExtents = 4096
)

// holeMap knows regions of a file that were never written: they read as zeros without asking the kernel, which would first fill its
// page cache with zeros, a whole read-ahead for each read. A region is only ever marked as written, so whoever sees it unmarked
// can rely on it without a lock. A nil map knows nothing.
type holeMap struct {
	written []atomic.Uint64 // a bit for each region
}

// newHoleMap learns where a disk has holes now. Nobody else may change what it describes.
func newHoleMap(d interface {
	Disk
	Extenter
}) *holeMap {
	size := d.Size()
	regions := (size + holeRegion - 1) / holeRegion
	h := &holeMap{written: make([]atomic.Uint64, (regions+63)/64)}
	for off, extents := int64(0), 0; off < size; extents++ {
		e, err := d.Extent(off, size-off)
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

// note marks a range that is going to be written.
func (h *holeMap) note(off, length int64) {
	if h == nil || length <= 0 {
		return
	}
	first, last := off/holeRegion, (off+length-1)/holeRegion
	for w := first / 64; w <= last/64; w++ {
		if mask := wordMask(w, first, last); h.written[w].Load()&mask != mask {
			h.written[w].Or(mask)
		}
	}
}

// empty reports that nothing was ever written to the range.
func (h *holeMap) empty(off, length int64) bool {
	if h == nil || length <= 0 {
		return false
	}
	first, last := off/holeRegion, (off+length-1)/holeRegion
	for w := first / 64; w <= last/64; w++ {
		if h.written[w].Load()&wordMask(w, first, last) != 0 {
			return false
		}
	}
	return true
}
