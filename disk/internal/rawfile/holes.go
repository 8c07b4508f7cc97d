package rawfile

import (
	"kubevirt.io/disk/disk"
)

const (
	// holeRegion is the granularity in bytes at which holes are remembered. A file of 16 TiB takes
	// 2 MiB of memory. The regions of a small file are smaller, for
	// the map that people see.
	holeRegion = 1 << 20
	// minHoleRegion is the hole region of small files, which may grow.
	minHoleRegion = 64 << 10
	// maxHoleExtents is how many extents of a file are looked at when it is opened. Everything
	// behind them counts as written.
	maxHoleExtents = 4096
)

// holeMap knows the regions of a file that were never written. They read as zeros without asking
// the kernel, which would first fill its page cache with zeros, a whole read-ahead for each read. A
// nil map knows nothing.
type holeMap struct {
	written *Regions
}

// newHoleMap asks a disk where it has holes. Nobody else may change the disk from then on.
func newHoleMap(d interface {
	disk.Disk
	disk.Extenter
}) *holeMap {
	size := d.Size()
	h := &holeMap{written: NewRegions(size,
		min(holeRegion, max(minHoleRegion, disk.MapCellBytes(size))))}
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
