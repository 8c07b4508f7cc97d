package qcow2

import "slices"

const (
	noKind = ^Kind(0)

	kindBits = 2
	// maxRuns bounds how many runs each goroutine notes: 128 KiB. If an image has more, its tables
	// are read again.
	maxRuns = 16 << 10
)

// runList notes where runs of another kind begin, in the order of the guest. An entry is the guest
// cluster, with the kind in the lowest bits. The zero value is empty.
type runList struct {
	starts []uint64
	full   bool // there were more runs than are noted
}

func (l *runList) begin(cluster int64, kind Kind) {
	if len(l.starts) == maxRuns {
		l.full = true
		return
	}
	l.starts = append(l.starts, uint64(cluster)<<kindBits|uint64(kind))
}

// joinRuns joins the lists of several goroutines that checked different tables. It returns nil if
// one of the lists is incomplete.
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

// runAt describes the run at off, at most length bytes. It uses the runs that were noted when the
// image was opened.
func (im *Image) runAt(off, length int64) (n int64, kind Kind) {
	cluster := uint64(off >> im.hdr.clusterBits)
	next, _ := slices.BinarySearch(im.runs, (cluster+1)<<kindBits)
	if next < len(im.runs) {
		length = min(length, int64(im.runs[next]>>kindBits)<<im.hdr.clusterBits-off)
	}
	return length, Kind(im.runs[next-1] & (1<<kindBits - 1))
}
