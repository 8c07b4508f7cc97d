package qcow2

import (
	"cmp"
	"slices"
)

// maxRuns bounds how many runs are noted: 1 MiB. If an image has more, its tables are read again.
const maxRuns = 64 << 10

// guestRun is a run of guest clusters of one kind, up to the next run.
type guestRun struct {
	cluster int64 // its first
	kind    Kind
}

// noteRun notes that a run begins, unless there are too many.
func (v *validator) noteRun(cluster int64, kind Kind) {
	if len(v.runs) <= maxRuns {
		v.runs = append(v.runs, guestRun{cluster, kind})
	}
}

// allRuns returns the noted runs in the order of the guest, or nil if some are missing.
func (v *validator) allRuns() []guestRun {
	if len(v.runs) > maxRuns || v.extended() {
		return nil
	}
	slices.SortFunc(v.runs, func(a, b guestRun) int { return cmp.Compare(a.cluster, b.cluster) })
	return slices.CompactFunc(v.runs, func(a, b guestRun) bool { return a.kind == b.kind })
}

// runAt describes the run at off, at most length bytes. It uses the runs that were noted when the
// image was opened.
func (im *Image) runAt(off, length int64) (n int64, kind Kind) {
	next, _ := slices.BinarySearchFunc(im.runs, off>>im.hdr.clusterBits+1,
		func(r guestRun, cluster int64) int { return cmp.Compare(r.cluster, cluster) })
	if next < len(im.runs) {
		length = min(length, im.runs[next].cluster<<im.hdr.clusterBits-off)
	}
	return length, im.runs[next-1].kind
}
