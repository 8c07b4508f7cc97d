package qcow2

import "sync/atomic"

const (
	// 4,096 clusters in 512 bytes, so an entry that points far away costs no more
	setPageBits  = 12
	setPageWords = 1 << setPageBits / 64
)

// clusterSet is a set of clusters of the file, or of its places (see starts). It consists of words
// of 64 clusters, in pages that are allocated on demand. Any number of goroutines may use it at
// once.
type clusterSet struct {
	pages []atomic.Pointer[[setPageWords]uint64]
}

func newClusterSet(clusters int64) clusterSet {
	return clusterSet{make([]atomic.Pointer[[setPageWords]uint64], clusters>>setPageBits+1)}
}

// word returns a bit for each cluster of the set among the 64 from 64*n on.
func (s clusterSet) word(n int64) uint64 {
	page := s.pages[n/setPageWords].Load()
	if page == nil {
		return 0
	}
	return atomic.LoadUint64(&page[n%setPageWords])
}

// add adds the clusters from 64*n on that have a bit in mask. It returns those that were already in
// the set.
func (s clusterSet) add(n int64, mask uint64) (before uint64) {
	slot := &s.pages[n/setPageWords]
	page := slot.Load()
	if page == nil {
		slot.CompareAndSwap(nil, new([setPageWords]uint64))
		page = slot.Load()
	}
	return atomic.OrUint64(&page[n%setPageWords], mask) & mask
}

// wordOf returns the bits of the clusters first to last in the word of first, and the first cluster
// of the next word.
func wordOf(first, last int64) (mask uint64, next int64) {
	next = (first>>6 + 1) << 6
	return ^uint64(0) << (first & 63) & (^uint64(0) >> max(0, next-1-last)), next
}
