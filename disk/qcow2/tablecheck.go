package qcow2

import (
	"context"
	"encoding/binary"
	"math/bits"
	"slices"
)

// maxCompressed bounds how many compressed clusters an image has. With clusters of 64 KiB, that
// many make 512 GiB of the disk. Each takes 8 bytes of memory while the image is opened.
const maxCompressed = 8 << 20

// check checks the L2 table of an L1 entry.
func (v *validator) check(entry int64, table []byte) error {
	first, step := entry*v.l2Entries(), v.entrySize()
	for i := range min(v.l2Entries(), (v.size-1)>>v.clusterBits+1-first) {
		e, sub := binary.BigEndian.Uint64(table[i*step:]), uint64(0)
		if v.extended() {
			sub = binary.BigEndian.Uint64(table[i*16+8:])
		}
		var err error
		switch guest := (first + i) << v.clusterBits; {
		case e|sub == 0:
		case e&entryCompressed != 0:
			err = v.compressed(guest, e, sub)
		default:
			err = v.plain(guest, e, sub)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// plain checks an entry that is not compressed.
func (v *validator) plain(guest int64, e, sub uint64) error {
	host, err := v.checkPlain(guest, e, sub, v.im.fileSize)
	if err != nil || host == 0 {
		return err
	}
	switch rest := v.size - guest; {
	case v.extended():
		v.plainSize += v.subclusterBytes(uint32(sub), rest)
	case e&entryZero == 0:
		v.plainSize += min(v.clusterSize(), rest)
	}
	switch n := host >> v.clusterBits; {
	case v.metadata.has(n):
		return bad("the cluster of guest offset %d lies at %#x, in the image's metadata", guest,
			host)
	case v.data.add(n):
		return bad("the cluster at %#x is used by more than one guest cluster", host)
	}
	return nil
}

// checkPlain checks an L2 entry that is not compressed. It returns where the cluster lies in the
// file, or 0 if it lies nowhere.
func (h *header) checkPlain(guest int64, e, sub uint64, fileSize int64) (host int64, err error) {
	if e&l2Reserved != 0 || e&entryZero != 0 && (h.version == 2 || h.extended()) {
		return 0, bad("the L2 entry of guest offset %d has reserved bits set (%#x)", guest, e)
	}
	host = int64(e & offsetMask)
	switch alloc, zero := uint32(sub), uint32(sub>>32); {
	case alloc&zero != 0:
		return 0, bad("subclusters of guest offset %d are both allocated and zero", guest)
	case alloc != 0 && host == 0:
		return 0, bad("subclusters of guest offset %d are allocated nowhere", guest)
	case host&(h.clusterSize()-1) != 0:
		return 0, bad("the cluster of guest offset %d lies at %#x, which is not aligned", guest,
			host)
	case host >= fileSize:
		return 0, bad("the cluster of guest offset %d lies at %#x, past the end of the file",
			guest, host)
	}
	return host, nil
}

// subclusterBytes returns how many of a cluster's first rest bytes are in subclusters whose bit in
// alloc is set.
func (h *header) subclusterBytes(alloc uint32, rest int64) (n int64) {
	sub := h.clusterSize() / 32
	for i := range int64(32) {
		if alloc>>i&1 != 0 {
			n += max(min(sub, rest-i*sub), 0)
		}
	}
	return n
}

// compressed checks an entry for compressed data, and keeps it for checkPacked.
func (v *validator) compressed(guest int64, e, sub uint64) error {
	off, length := v.compressedRange(e)
	sectorsEnd := (v.im.fileSize + sectorSize - 1) &^ (sectorSize - 1)
	switch {
	case sub != 0:
		return bad("the compressed cluster of guest offset %d has subclusters", guest)
	case e&entryCopied != 0:
		return unsupported(actionConvert, "the compressed cluster of guest offset %d is marked as "+
			"not shared", guest)
	case off >= v.im.fileSize || length > sectorsEnd-off:
		return bad("the compressed data of guest offset %d, %d bytes at %#x, runs past the end "+
			"of the file", guest, length, off)
	case len(v.packed) == maxCompressed:
		return unsupported("convert it with \"qemu-img convert -O qcow2\", not compressed or to "+
			"larger clusters", "it has more than %d compressed clusters", maxCompressed)
	case v.packed == nil:
		v.packed = make([]uint64, 0, min(v.tables*v.l2Entries(), maxCompressed))
	}
	v.compressedSize += min(v.clusterSize(), v.size-guest)
	v.packed = append(v.packed, bits.RotateLeft64(e&(entryCompressed-1), 64-int(v.lengthShift())))
	return nil
}

// checkPacked fails if compressed data is used twice: a small file could then decode to any size.
// It also fails if compressed data shares a cluster of the file with anything else.
func (v *validator) checkPacked() error {
	slices.Sort(v.packed) // by the offset, which is in the high bits
	before := int64(-1)
	for _, e := range v.packed {
		off, length := v.compressedRange(bits.RotateLeft64(e, int(v.lengthShift())))
		if off == before {
			return bad("the compressed data at %#x is used by more than one cluster", off)
		}
		before = off
		for n := off >> v.clusterBits; n <= (min(off+length, v.im.fileSize)-1)>>v.clusterBits; n++ {
			switch {
			case v.metadata.has(n):
				return bad("the compressed data at %#x lies in the image's metadata", off)
			case v.data.has(n):
				return unsupported(actionConvert, "the compressed data at %#x overlaps another "+
					"cluster", off)
			}
		}
	}
	return nil
}

// setPageBits says how many clusters a page of a set has: 4,096, in 512 bytes. The pages are small,
// so that entries that point far away cost little.
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

// Place is where an image stores a cluster of its guest. All numbers are bytes.
type Place struct {
	Guest int64
	Kind  Kind
	// Host and Length are where the cluster's content lies in the file. KindCompressed: the content
	// may end earlier. KindZero: both are 0.
	Host, Length int64
}

// Places calls visit for each cluster that the image itself has, in the order of the disk, until
// visit returns false. For an image with subclusters it calls nothing. It may wait for tables, as
// ReadAt does.
func (im *Image) Places(ctx context.Context, visit func(Place) bool) error {
	h := im.hdr
	if h.extended() {
		return nil
	}
	for off := int64(0); off < h.size; {
		table, first, limit, err := im.tableAt(ctx, off, h.size-off, false)
		if err != nil {
			return err
		}
		if table.data == nil {
			off += limit
			continue
		}
		for i := first; limit > 0; i++ {
			e := h.entry(table.data, i)
			p := Place{Guest: off, Kind: entryKind(e)}
			switch p.Kind {
			case KindData:
				p.Host, p.Length = int64(e&offsetMask), h.clusterSize()
			case KindCompressed:
				p.Host, p.Length = h.compressedRange(e)
			}
			if p.Kind != KindUnallocated && !visit(p) {
				table.release()
				return nil
			}
			off += h.clusterSize()
			limit -= h.clusterSize()
		}
		table.release()
	}
	return nil
}
