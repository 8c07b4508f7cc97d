package ext4

import (
	"errors"
	"math/bits"
)

// errFull says that the file system would need more groups than the head of a group can describe.
var errFull = errors.New("the file system would be larger than 1,016 GiB")

// allocator allocates blocks, each at most once and in ascending order.
type allocator struct {
	next uint32   // every block from here on is free, except heads of groups
	bits [][]byte // by group: the blocks in use; nil: none was ever allocated
}

// take allocates the next blocks, at most n in one run. A run ends at the end of its group.
func (a *allocator) take(n uint32) (start, got uint32, err error) {
	group := a.next / blocksPerGroup
	if head := group*blocksPerGroup + headLength(group); a.next < head {
		a.next = head
	}
	if group >= maxGroups {
		return 0, 0, errFull
	}
	start = a.next
	got = min(n, (group+1)*blocksPerGroup-start)
	a.next += got
	bitmap := a.bitmap(group)
	for i := start % blocksPerGroup; i < start%blocksPerGroup+got; i++ {
		bitmap[i/8] |= 1 << (i % 8)
	}
	return start, got, nil
}

// free frees blocks of one group.
func (a *allocator) free(start, n uint32) {
	bitmap := a.bitmap(start / blocksPerGroup)
	for i := start % blocksPerGroup; i < start%blocksPerGroup+n; i++ {
		bitmap[i/8] &^= 1 << (i % 8)
	}
}

// freeRun frees blocks that may lie in several groups.
func (a *allocator) freeRun(start, n uint32) {
	for n > 0 {
		here := min(n, blocksPerGroup-start%blocksPerGroup)
		a.free(start, here)
		start, n = start+here, n-here
	}
}

// bitmap returns the blocks in use of a group.
func (a *allocator) bitmap(group uint32) []byte {
	for uint32(len(a.bits)) <= group {
		a.bits = append(a.bits, nil)
	}
	if a.bits[group] == nil {
		a.bits[group] = make([]byte, BlockSize)
	}
	return a.bits[group]
}

// touched reports whether a block of the group was ever allocated, so that its bitmap has to be
// written.
func (a *allocator) touched(group uint32) bool {
	return group < uint32(len(a.bits)) && a.bits[group] != nil
}

// full fills p with the bitmap of a group as it is stored in a file system with that many groups,
// and returns how many blocks are in use.
func (a *allocator) full(p []byte, group, groups uint32) (used uint32) {
	clear(p)
	if a.touched(group) {
		copy(p, a.bits[group])
	}
	n := uint32(0)
	if hasSuper(group) {
		setBits(p, 0, 1+descBlocks(groups))
		n = headBlocks
	}
	if group%groupsPerFlex == 0 {
		setBits(p, n, flexBlocks)
	}
	for _, b := range p {
		used += uint32(bits.OnesCount8(b))
	}
	return used
}

func setBits(p []byte, from, n uint32) {
	for i := from; i < from+n; i++ {
		p[i/8] |= 1 << (i % 8)
	}
}
