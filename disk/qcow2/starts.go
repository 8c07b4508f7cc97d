package qcow2

import (
	"context"
	"slices"
	"sync/atomic"
)

// starts finds compressed data that several clusters share: a small file could then decode to any
// size. Sorting all the places where data begins took longer than the rest of opening an image.
// Instead, the file is divided into places of a sector or several. If data reaches beyond the place
// in which it begins, no other such data can begin in that place: a bit for each place tells. Data
// that ends in its own place is rare, and is listed. The two are not compared with each other. If
// one entry says that data ends in its place and another says that it does not, both may use it,
// but no third one.
type starts struct {
	shift uint       // a place has 1<<shift bytes
	large clusterSet // places in which data begins that ends elsewhere
	// places in which several such data begin; such an image is bad, or it has its own meaning of
	// lengths
	twice clusterSet
	again atomic.Bool // twice is not empty
}

// maxSmall bounds how much data is listed, of which each takes 8 bytes more than once: for 256 GiB
// of clusters of 64 KiB that all compress to less than 4 KiB.
const maxSmall = 4 << 20

func tooManySmall() error {
	return unsupported(actionConvert, "it has more than %d clusters of very little compressed data",
		maxSmall)
}

// maxStarts bounds how many places there are: 8 MiB of bits.
const maxStarts = 1 << 26

// init chooses places so large that few clusters compress to less than one. Touching more memory
// takes longer.
func (s *starts) init(h *header, fileSize int64) {
	s.shift = max(sectorBits, h.clusterBits-4)
	for fileSize>>s.shift >= maxStarts {
		s.shift++
	}
	places := fileSize>>s.shift + 1
	s.large, s.twice = newClusterSet(places), newClusterSet(places)
}

// add adds the places of a word from which data begins that ends elsewhere.
func (s *starts) add(c claims) { s.repeat(c.word, s.large.add(c.word, c.mask)) }

// repeat records that such data begins there once more.
func (s *starts) repeat(word int64, mask uint64) {
	if mask != 0 {
		s.twice.add(word, mask)
		s.again.Store(true)
	}
}

// checkStarts fails if compressed data is used twice.
func (v *validator) checkStarts(ctx context.Context, checks []*tableCheck) error {
	found := make([]int64, 0, v.small.Load())
	for _, c := range checks {
		found, c.small = append(found, c.small...), nil
	}
	if err := notTwice(found); err != nil || !v.starts.again.Load() {
		return err
	}
	found = nil
	c := v.newCheck()
	for entry := range v.im.l1 {
		if v.im.l1[entry]&offsetMask == 0 {
			continue
		}
		if err := c.load(ctx, int64(entry)); err != nil {
			return err
		}
		for at := int64(0); at < int64(len(c.table)); at += c.entrySize() {
			e, _ := c.entryAt(at)
			if e&entryCompressed == 0 {
				continue
			}
			// A table that was read again may have changed.
			off, _ := c.compressedRange(e)
			n := off >> v.starts.shift
			if off < v.im.fileSize && v.starts.twice.word(n>>6)>>(n&63)&1 != 0 {
				if found = append(found, off); len(found) > maxSmall {
					return tooManySmall()
				}
			}
		}
	}
	return notTwice(found)
}

func notTwice(list []int64) error {
	slices.Sort(list)
	for i, off := range list {
		if i > 0 && off == list[i-1] {
			return bad("the compressed data at %#x is used by more than one cluster", off)
		}
	}
	return nil
}
