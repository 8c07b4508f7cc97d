package qcow2

import "slices"

const (
	noKind = ^Kind(0)

	kindBits = 2
	// maxRuns bounds what each of several goroutines notes of an image: 128 KiB. Of an image of
	// more runs the tables are read again.
	maxRuns = 16 << 10
)

// runList is where clusters of another kind begin, as it was found in the order of the guest: the
// guest's cluster, and the kind in the lowest bits. The zero value is empty.
type runList struct {
	starts []uint64
	full   bool // there were more than are noted
}

func (l *runList) begin(cluster int64, kind Kind) {
	if len(l.starts) == maxRuns {
		l.full = true
		return
	}
	l.starts = append(l.starts, uint64(cluster)<<kindBits|uint64(kind))
}

// joinRuns makes one list of those of several goroutines, each of which looked at other tables; nil
// if one of them is not complete.
func joinRuns(lists ...runList) []uint64 {
	var all []uint64
	for _, l := range lists {
		if l.full {
			return nil
		}
		all = append(all, l.starts...)
	}
	slices.Sort(all)
	return slices.CompactFunc(all, func(a, b uint64) bool { return (a^b)&(1<<kindBits-1) == 0 })
}

// runAt describes the run at off, at most length bytes of it, from what was noted when the image
// was opened.
func (im *Image) runAt(off, length int64) (n int64, kind Kind) {
	cluster := uint64(off >> im.hdr.clusterBits)
	next, _ := slices.BinarySearch(im.runs, (cluster+1)<<kindBits)
	if next < len(im.runs) {
		length = min(length, int64(im.runs[next]>>kindBits)<<im.hdr.clusterBits-off)
	}
	return length, Kind(im.runs[next-1] & (1<<kindBits - 1))
}
