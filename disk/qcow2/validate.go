package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

const (
	offsetMask      = 0x00fffffffffffe00
	entryZero       = 1 << 0
	entryCompressed = 1 << 62
	entryCopied     = 1 << 63

	l1Reserved = ^uint64(offsetMask | entryCopied)
	l2Reserved = ^uint64(offsetMask | entryCopied | entryCompressed | entryZero)
)

// bitmap is a set of cluster numbers in pages that are made when they are needed. Clusters that are asked for one after the other mostly lie
// near each other, so the last page is at hand.
type bitmap struct {
	pages map[int64]*[512]uint64
	index int64
	page  *[512]uint64 // number index; nil: there is none
}

func newBitmap() bitmap { return bitmap{pages: make(map[int64]*[512]uint64), index: -1} }

func (b *bitmap) turn(index int64) {
	if b.index != index {
		b.index, b.page = index, b.pages[index]
	}
}

func (b *bitmap) has(n int64) bool {
	b.turn(n >> 15)
	return b.page != nil && b.page[n>>6&511]>>(n&63)&1 != 0
}

// add reports whether n was not in the set.
func (b *bitmap) add(n int64) bool {
	b.turn(n >> 15)
	if b.page == nil {
		b.page = new([512]uint64)
		b.pages[b.index] = b.page
	}
	w, bit := &b.page[n>>6&511], uint64(1)<<(n&63)
	fresh := *w&bit == 0
	*w |= bit
	return fresh
}

// validator goes through all tables once, a table at a time, and knows which clusters of the file are taken.
type validator struct {
	im        *Image
	metadata  bitmap
	data      bitmap
	packed    bitmap   // clusters that hold compressed data, which may share them
	starts    []uint64 // of compressed data
	allocated int64
}

func (v *validator) run() error {
	h := v.im.hdr
	v.metadata.add(0)
	if err := v.claim("L1 table", h.l1Offset, int64(h.l1Size)*8); err != nil {
		return err
	}
	if err := v.refcounts(); err != nil {
		return err
	}
	for i, e := range v.im.l1 {
		if e&l1Reserved != 0 {
			return bad("L1 entry %d has reserved bits set (%#x)", i, e)
		}
		off := int64(e & offsetMask)
		if off == 0 {
			continue
		}
		if err := v.claim(fmt.Sprintf("L2 table %d", i), off, h.clusterSize()); err != nil {
			return err
		}
	}
	table := make([]byte, h.clusterSize())
	for i, e := range v.im.l1 {
		off := int64(e & offsetMask)
		if off == 0 {
			continue
		}
		if _, err := v.im.r.ReadAt(table, off); err != nil {
			return fmt.Errorf("reading L2 table %d: %w", i, err)
		}
		if err := v.l2(int64(i), table); err != nil {
			return err
		}
	}
	slices.Sort(v.starts)
	for i := 1; i < len(v.starts); i++ {
		if v.starts[i] == v.starts[i-1] {
			return bad("the compressed data at %#x is used by more than one cluster", v.starts[i])
		}
	}
	return nil
}

// claim takes whole clusters for metadata.
func (v *validator) claim(what string, off, length int64) error {
	h := v.im.hdr
	switch {
	case length == 0:
		return nil
	case off&(h.clusterSize()-1) != 0:
		return bad("the %s at %#x is not aligned to a cluster", what, off)
	case off > v.im.fileSize-length:
		return bad("the %s at %#x runs past the end of the file", what, off)
	}
	for n := off >> h.clusterBits; n<<h.clusterBits < off+length; n++ {
		if !v.metadata.add(n) {
			return bad("the %s at %#x overlaps other metadata", what, off)
		}
	}
	return nil
}

// refcounts takes the refcount table and its blocks, so that nothing else points there. What they say is not needed.
func (v *validator) refcounts() error {
	h := v.im.hdr
	length := h.refTableLen << h.clusterBits
	if err := v.claim("refcount table", h.refTableOffset, length); err != nil {
		return err
	}
	page := make([]byte, min(length, 64<<10))
	for done := int64(0); done < length; done += int64(len(page)) {
		if _, err := io.ReadFull(io.NewSectionReader(v.im.r, h.refTableOffset+done, length-done), page[:min(int64(len(page)), length-done)]); err != nil {
			return fmt.Errorf("reading the refcount table: %w", err)
		}
		for i := 0; i+8 <= len(page) && done+int64(i) < length; i += 8 {
			off := binary.BigEndian.Uint64(page[i:])
			if off == 0 {
				continue
			}
			if off > 1<<62 {
				return bad("a refcount block lies at %#x, past the end of the file", off)
			}
			if err := v.claim("refcount block", int64(off), h.clusterSize()); err != nil {
				return err
			}
		}
	}
	return nil
}

func (v *validator) l2(index int64, table []byte) error {
	h := v.im.hdr
	for i := range h.l2Entries() {
		guest := (index*h.l2Entries() + i) << h.clusterBits
		if guest >= h.size {
			return nil // never read
		}
		e := binary.BigEndian.Uint64(table[i*h.entrySize():])
		var sub uint64
		if h.extended() {
			sub = binary.BigEndian.Uint64(table[i*16+8:])
		}
		if e == 0 && sub == 0 {
			continue
		}
		if err := v.entry(guest, e, sub); err != nil {
			return err
		}
	}
	return nil
}

func (v *validator) entry(guest int64, e, sub uint64) error {
	h := v.im.hdr
	if e&entryCompressed != 0 {
		if sub != 0 {
			return bad("the compressed cluster of guest offset %d has subclusters", guest)
		}
		v.allocated += min(h.clusterSize(), h.size-guest)
		return v.compressed(guest, e)
	}
	if e&l2Reserved != 0 || e&entryZero != 0 && (h.version == 2 || h.extended()) {
		return bad("the L2 entry of guest offset %d has reserved bits set (%#x)", guest, e)
	}
	host := int64(e & offsetMask)
	alloc, zero := uint32(sub), uint32(sub>>32)
	switch {
	case alloc&zero != 0:
		return bad("subclusters of guest offset %d are both allocated and zero", guest)
	case alloc != 0 && host == 0:
		return bad("subclusters of guest offset %d are allocated nowhere", guest)
	case host == 0:
		return nil
	case host&(h.clusterSize()-1) != 0:
		return bad("the cluster of guest offset %d lies at %#x, which is not aligned", guest, host)
	case host >= v.im.fileSize:
		return bad("the cluster of guest offset %d lies at %#x, past the end of the file", guest, host)
	}
	n := host >> h.clusterBits
	switch {
	case v.metadata.has(n):
		return bad("the cluster of guest offset %d lies at %#x, in the image's metadata", guest, host)
	case v.packed.has(n):
		return bad("the cluster of guest offset %d lies at %#x, among compressed data", guest, host)
	case !v.data.add(n):
		return bad("the cluster at %#x is used by more than one guest cluster", host)
	}
	if e&entryZero == 0 {
		v.allocated += min(h.clusterSize(), h.size-guest)
	}
	return nil
}

// compressedRange is where an entry's compressed data lies. The length is counted in sectors, so that the last ones
// of a file may run past its end by less than a sector.
func (h *header) compressedRange(e uint64) (off, length int64) {
	shift := 62 - (h.clusterBits - 8)
	off = int64(e & (1<<shift - 1))
	sectors := int64(e&(entryCompressed-1)>>shift) + 1
	return off, sectors*512 - off&511
}

func (v *validator) compressed(guest int64, e uint64) error {
	h := v.im.hdr
	if e&entryCopied != 0 {
		return bad("the compressed cluster of guest offset %d is marked as not shared", guest)
	}
	off, length := h.compressedRange(e)
	if off >= v.im.fileSize || length > (v.im.fileSize+511)&^511-off {
		return bad("the compressed data of guest offset %d, %d bytes at %#x, runs past the end of the file", guest, length, off)
	}
	end := min(off+length, v.im.fileSize)
	for n := off >> h.clusterBits; n<<h.clusterBits < end; n++ {
		switch {
		case v.metadata.has(n):
			return bad("the compressed data of guest offset %d lies in the image's metadata", guest)
		case v.data.has(n):
			return bad("the compressed data of guest offset %d overlaps another cluster", guest)
		}
		v.packed.add(n)
	}
	v.starts = append(v.starts, uint64(off))
	return nil
}
