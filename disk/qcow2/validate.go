package qcow2

import (
	"context"
	"encoding/binary"
	"fmt"
)

const (
	offsetMask      = 0x00fffffffffffe00
	entryZero       = 1 << 0
	entryCompressed = 1 << 62
	entryCopied     = 1 << 63

	l1Reserved = ^uint64(offsetMask | entryCopied)
	l2Reserved = ^uint64(offsetMask | entryCopied | entryCompressed | entryZero)
)

const (
	// tablesAhead is how many L2 tables are announced to storage ahead of time. The tables lie far
	// apart. If none is in memory, opening would mostly wait for one after the other.
	tablesAhead = 32
	// minAhead is the smallest table that is announced. The kernel's read-ahead reads several
	// smaller ones at once. Bytes.
	minAhead = 4 << 10
)

// validator goes through all tables once and records which clusters of the file are taken.
type validator struct {
	*header
	im       *Image
	willRead func(off, length int64)
	metadata clusterSet // complete before the first L2 entry is checked
	data     clusterSet
	tables   int64    // how many L2 tables there are
	packed   []uint64 // the entries for compressed data, rotated: the offset is in the high bits

	plainSize, compressedSize int64 // guest bytes
}

func newValidator(im *Image, willRead func(off, length int64)) *validator {
	clusters := im.fileSize>>im.hdr.clusterBits + 1
	return &validator{header: im.hdr, im: im, willRead: willRead,
		metadata: newClusterSet(clusters), data: newClusterSet(clusters)}
}

// run returns how many guest bytes the file stores uncompressed, and how many compressed. parallel
// is Options.Parallel.
func (v *validator) run(ctx context.Context, parallel int) (plain, compressed int64, err error) {
	v.metadata.add(0) // the header
	if err := v.claim("L1 table", v.l1Offset, int64(v.l1Size)*8); err != nil {
		return 0, 0, err
	}
	if err := v.refcounts(ctx, parallel > 1); err != nil {
		return 0, 0, err
	}
	for i, e := range v.im.l1 {
		if e&l1Reserved != 0 {
			return 0, 0, bad("L1 entry %d has reserved bits set (%#x)", i, e)
		}
		off := int64(e & offsetMask)
		if off == 0 { // a part of the guest without a table
			continue
		}
		v.tables++
		if err := v.claim(fmt.Sprintf("L2 table %d", i), off, v.clusterSize()); err != nil {
			return 0, 0, err
		}
	}
	if parallel > 1 {
		err = v.checkFar(ctx, parallel)
	} else {
		err = v.checkNear(ctx)
	}
	if err != nil {
		return 0, 0, err
	}
	return v.plainSize, v.compressedSize, v.checkPacked()
}

// checkNear reads and checks one L2 table after the other.
func (v *validator) checkNear(ctx context.Context) error {
	for i := range min(tablesAhead, int64(len(v.im.l1))) {
		v.expect(i)
	}
	table := make([]byte, v.clusterSize())
	for i, e := range v.im.l1 {
		v.expect(int64(i) + tablesAhead)
		if e&offsetMask == 0 {
			continue
		}
		err := ctx.Err()
		if err == nil {
			err = v.im.loadTable(ctx, table, e&offsetMask)
		}
		if err == nil {
			err = v.check(int64(i), table)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// expect announces that the L2 table of an L1 entry will be read, if both exist.
func (v *validator) expect(entry int64) {
	if entry >= int64(len(v.im.l1)) || v.clusterSize() < minAhead {
		return
	}
	if off := int64(v.im.l1[entry] & offsetMask); off != 0 {
		v.willRead(off, v.clusterSize())
	}
}

// claim notes that whole clusters are metadata. It fails if one of them is so already.
func (v *validator) claim(what string, off, length int64) error {
	switch {
	case length == 0:
		return nil
	case off&(v.clusterSize()-1) != 0:
		return bad("the %s at %#x is not aligned to a cluster", what, off)
	case off > v.im.fileSize-length:
		return bad("the %s at %#x runs past the end of the file", what, off)
	}
	for n := off >> v.clusterBits; n<<v.clusterBits < off+length; n++ {
		if v.metadata.add(n) {
			return bad("the %s at %#x overlaps other metadata", what, off)
		}
	}
	return nil
}

// refcounts claims the clusters of the refcount table and its blocks, so that nothing else may
// point there. It does not read the refcounts.
func (v *validator) refcounts(ctx context.Context, far bool) error {
	length, atOnce := v.refTableLen<<v.clusterBits, int64(64<<10)
	if far {
		atOnce = maxFarRead
	}
	if err := v.claim("refcount table", v.refTableOffset, length); err != nil {
		return err
	}
	page := make([]byte, min(length, atOnce))
	for done := int64(0); done < length; done += int64(len(page)) {
		part := page[:min(int64(len(page)), length-done)]
		if err := readFull(ctx, v.im.r, part, v.refTableOffset+done); err != nil {
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
			if err := v.claim("refcount block", int64(off), v.clusterSize()); err != nil {
				return err
			}
		}
	}
	return nil
}
