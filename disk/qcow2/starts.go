package qcow2

import (
	"cmp"
	"context"
	"slices"
)

// No two clusters may share compressed data, or a small file could be decoded to any size. To sort
// where all of it begins took longer than everything else that is looked at when an image is
// opened. But of data that reaches beyond the place of the file in which it begins, a sector or
// several, only one can begin there. So each goroutine has a bit for each place where such data
// begins, and a list of what ends in the place in which it begins, as little does. Between the two
// nothing is compared: what one entry says to end there and another not, may be used by both, and
// by no third one.

const (
	startPageBits  = 18 // of a set: 32 KiB
	startPageWords = 1 << startPageBits / 64
	maxStartBits   = 1 << 26 // of a set: 8 MiB
)

// startSet is a set of places of the file, which are numbered from its beginning.
type startSet struct {
	shift uint // a place has 1<<shift bytes
	pages []*startPage
}

type startPage [startPageWords]uint64

// newStartSet has places so large that few clusters of such an image are compressed to less: the
// more memory is touched, the longer it takes.
func newStartSet(im *Image) startSet {
	s := startSet{shift: max(sectorBits, im.hdr.clusterBits-5)}
	for im.fileSize>>s.shift >= maxStartBits {
		s.shift++
	}
	s.pages = make([]*startPage, im.fileSize>>s.shift>>startPageBits+1)
	return s
}

// page is that of a place, to add it there.
func (s *startSet) page(n int64) *startPage {
	page := &s.pages[n>>startPageBits]
	if *page == nil {
		*page = new(startPage)
		// memory that is read before it is written is mapped twice, and to exchange that interrupts
		// all processors
		clear((*page)[:])
	}
	return *page
}

// add puts a place of the page into the set, and reports whether it was not there before.
func (p *startPage) add(n int64) (added bool) {
	word, bit := &p[n>>6&(startPageWords-1)], uint64(1)<<(n&63)
	added = *word&bit == 0
	*word |= bit
	return added
}

// has says whether the place of a byte is in the set; one past the end of the file never is.
func (s *startSet) has(off int64) bool {
	n := off >> s.shift
	if n>>startPageBits >= int64(len(s.pages)) {
		return false
	}
	page := s.pages[n>>startPageBits]
	return page != nil && page[n>>6&(startPageWords-1)]>>(n&63)&1 != 0
}

// any says whether a place from that of byte first to that of byte last is in the set.
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

// join puts everything of from, which is not used any more, into the set, and what was there before
// into both.
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

// starts is what a goroutine knows of where compressed data begins.
type starts struct {
	small []int64  // of what ends in its place: bytes
	large startSet // of all others
	// places where more than one begins that is large, in an image that is bad or understands
	// lengths in a way of its own
	twice startSet
	spans []startSpan
}

// startSpan is between which bytes of the file the compressed data of an L2 table begins.
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

// startsIn reads the tables again that may have data that begins at one of the places, and returns
// where all of it begins, also what is small.
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
