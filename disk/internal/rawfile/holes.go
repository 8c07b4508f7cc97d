package rawfile

import (
	"kubevirt.io/disk/disk"
)

const (
	// holeRegion is how finely a file's holes are remembered, bytes: 2 MiB of memory for 16 TiB.
	holeRegion = 1 << 20
	// maxHoleExtents bounds how many extents of a file are asked for when it is opened; what lies
	// behind them counts as written.
	maxHoleExtents = 4096
)

// holeMap knows regions of a file that were never written: they read as zeros without asking the
// kernel, which would first fill its page cache with zeros, a whole read-ahead for each read. A nil
// map knows nothing.
type holeMap struct {
	written *Regions
}

// newHoleMap learns where a disk has holes now. Nobody else may change what it describes.
func newHoleMap(d interface {
	disk.Disk
	disk.Extenter
}) *holeMap {
	size := d.Size()
	h := &holeMap{written: NewRegions(size, holeRegion)}
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
	if h != nil && length > 0 {
		h.written.Add(off, length)
	}
}

// empty reports that nothing was ever written to the range.
func (h *holeMap) empty(off, length int64) bool {
	return h != nil && length > 0 && !h.written.touches(off, length)
}
