package qcow2

// setPageBits says how many clusters a page of a set has: 4,096, in 512 bytes. So an entry that
// points far away costs no more.
const setPageBits = 12

// clusterSet is a set of clusters of the file: a bit each, in pages that are allocated on demand.
type clusterSet []*[1 << setPageBits / 64]uint64

// newClusterSet returns a set with room for that many clusters.
func newClusterSet(clusters int64) clusterSet {
	return make(clusterSet, (clusters-1)>>setPageBits+1)
}

func (s clusterSet) has(n int64) bool {
	page := s[n>>setPageBits]
	return page != nil && page[n>>6%int64(len(page))]>>(n&63)&1 != 0
}

// add adds cluster n, and reports whether it was in the set before.
func (s clusterSet) add(n int64) bool {
	page := s[n>>setPageBits]
	if page == nil {
		page = new([1 << setPageBits / 64]uint64)
		s[n>>setPageBits] = page
	}
	word, bit := &page[n>>6%int64(len(page))], uint64(1)<<(n&63)
	before := *word&bit != 0
	*word |= bit
	return before
}
