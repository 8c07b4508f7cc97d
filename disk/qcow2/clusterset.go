package qcow2

import "sync/atomic"

const (
	// 4,096 clusters in 512 bytes: an entry that points somewhere far costs no more
	setPageBits  = 12
	setPageWords = 1 << setPageBits / 64
)

// clusterSet is a set of clusters of the file, in words of 64 clusters and pages that are made when
// they are needed. It may be used from any number of goroutines at once.
type clusterSet struct {
	pages []atomic.Pointer[[setPageWords]uint64]
}

func newClusterSet(clusters int64) clusterSet {
	return clusterSet{make([]atomic.Pointer[[setPageWords]uint64], clusters>>setPageBits+1)}
}

// word has a bit for each of the clusters from 64*n that are in the set.
func (s clusterSet) word(n int64) uint64 {
	page := s.pages[n/setPageWords].Load()
	if page == nil {
		return 0
	}
	return atomic.LoadUint64(&page[n%setPageWords])
}

// add puts the clusters from 64*n that have a bit in mask into the set, and returns those that were
// there before.
func (s clusterSet) add(n int64, mask uint64) (before uint64) {
	slot := &s.pages[n/setPageWords]
	page := slot.Load()
	if page == nil {
		slot.CompareAndSwap(nil, new([setPageWords]uint64))
		page = slot.Load()
	}
	return atomic.OrUint64(&page[n%setPageWords], mask) & mask
}

// wordOf returns the bits that the clusters first to last have in the word of first, and the first
// cluster of the next word.
func wordOf(first, last int64) (mask uint64, next int64) {
	next = (first>>6 + 1) << 6
	return ^uint64(0) << (first & 63) & (^uint64(0) >> max(0, next-1-last)), next
}
