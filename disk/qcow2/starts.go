package qcow2

import (
	"cmp"
	"context"
	"slices"
)

// No two clusters may share compressed data, or a small file could decode to any size. Sorting all
// the places where it begins took longer than the rest of opening an image. Instead, the file is
// divided into places of a sector or several. If data reaches beyond the place in which it begins,
// no other such data can begin in that place. So each goroutine has one bit for each place in which
// such data begins, and a list of the data that ends in its own place, which is rare. The two are
// not compared with each other. If one entry says that data ends in its place and another says that
// it does not, both may use it, but no third one.

const (
	startPageBits  = 18 // of a set: 32 KiB
	startPageWords = 1 << startPageBits / 64
	maxStartBits   = 1 << 26 // of a set: 8 MiB
)

// startSet is a set of places of the file, numbered from its beginning.
type startSet struct {
	shift uint // a place has 1<<shift bytes
	pages []*startPage
}

type startPage [startPageWords]uint64

// newStartSet chooses places so large that few clusters compress to less than one. Touching more
// memory takes longer.
func newStartSet(im *Image) startSet {
	s := startSet{shift: max(sectorBits, im.hdr.clusterBits-5)}
	for im.fileSize>>s.shift >= maxStartBits {
		s.shift++
	}
	s.pages = make([]*startPage, im.fileSize>>s.shift>>startPageBits+1)
	return s
}

// page returns the page of a place, to add the place to it.
func (s *startSet) page(n int64) *startPage {
	page := &s.pages[n>>startPageBits]
	if *page == nil {
		*page = new(startPage)
		// Memory that is read before it is written is mapped twice, and exchanging the mapping
		// interrupts all processors.
		clear((*page)[:])
	}
	return *page
}

// add adds a place of the page to the set and reports whether it is new.
func (p *startPage) add(n int64) (added bool) {
	word, bit := &p[n>>6&(startPageWords-1)], uint64(1)<<(n&63)
	added = *word&bit == 0
	*word |= bit
	return added
}

// has reports whether the place of a byte is in the set. A byte past the end of the file never is.
func (s *startSet) has(off int64) bool {
	n := off >> s.shift
	if n>>startPageBits >= int64(len(s.pages)) {
		return false
	}
	page := s.pages[n>>startPageBits]
	return page != nil && page[n>>6&(startPageWords-1)]>>(n&63)&1 != 0
}

// any reports whether the set contains a place between those of the bytes first and last,
// inclusive.
func (s *startSet) any(first, last int64) bool {
	for n, end := first>>s.shift, last>>s.shift; n <= end; {
		page := s.pages[n>>startPageBits]
		if page == nil {
			n = (n>>startPageBits + 1) << startPageBits
			continue
		}
		mask, next := wordOf(n, end)
		if page[n>>6&(startPageWords-1)]&mask != 0 {
			return true
		}
		n = next
	}
	return false
}

func (s *startSet) empty() bool {
	return !slices.ContainsFunc(s.pages, func(page *startPage) bool { return page != nil })
}

// join adds everything in from to the set, and everything that was in both already to both. from
// must not be used afterwards.
func (s *startSet) join(from, both *startSet) {
	for i, page := range from.pages {
		to := s.pages[i]
		if to == nil || page == nil {
			s.pages[i] = cmp.Or(to, page)
			continue
		}
		for w := range page {
			if twice := page[w] & to[w]; twice != 0 {
				both.page(int64(i) << startPageBits)[w] |= twice
			}
			to[w] |= page[w]
		}
	}
}

// starts is what one goroutine knows about where compressed data begins.
type starts struct {
	small []int64  // offsets of data that ends in its place
	large startSet // places of all other data
	// places in which several large ones begin; such an image is bad, or it has its own meaning of
	// lengths
	twice startSet
	spans []startSpan
}

// startSpan is the first and the last offset at which compressed data of an L2 table begins.
type startSpan struct {
	entry       int64 // of the L1 table
	first, last int64
}

func newStarts(im *Image) starts { return starts{large: newStartSet(im), twice: newStartSet(im)} }

// checkStarts fails if compressed data is used twice.
func (v *validator) checkStarts(ctx context.Context, checks []*tableCheck) error {
	all := newStarts(v.im)
	for _, c := range checks {
		all.small = append(all.small, c.starts.small...)
		all.spans = append(all.spans, c.starts.spans...)
		all.twice.join(&c.starts.twice, &all.twice)
		all.large.join(&c.starts.large, &all.twice)
	}
	if err := notTwice(all.small); err != nil || all.twice.empty() {
		return err
	}
	found, err := v.startsIn(ctx, &all.twice, all.spans)
	if err != nil {
		return err
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

// startsIn reads the tables again whose data may begin at one of the places. It returns all offsets
// in these places where data begins, including small data.
func (v *validator) startsIn(ctx context.Context, places *startSet, spans []startSpan) (
	list []int64, err error,
) {
	c := &tableCheck{validator: v}
	for _, span := range spans {
		if !places.any(span.first, span.last) {
			continue
		}
		if err := c.load(ctx, span.entry); err != nil {
			return nil, err
		}
		for at := int64(0); at < int64(len(c.table)); at += c.entrySize() {
			e, _ := c.entryAt(at)
			if e&entryCompressed == 0 {
				continue
			}
			if off, _ := c.compressedRange(e); places.has(off) {
				list = append(list, off)
			}
		}
	}
	return list, nil
}
