package qcow2

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
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
	maxChecks = 4 // each has a table of up to 2 MiB in memory

	// tablesAhead is how many L2 tables are announced to storage ahead of time. The tables lie far
	// apart. If nothing is in memory, most of the time of opening would be spent waiting for one
	// after the other.
	tablesAhead = 32
	// minAhead is the smallest table that is announced. The kernel reads several smaller ones at
	// once anyway. Bytes.
	minAhead = 4 << 10
)

// validator goes through all tables once and records which clusters of the file are taken. Large
// images have hundreds of L2 tables and the start waits for this, so several goroutines check them.
type validator struct {
	*header
	im       *Image
	willRead func(off, length int64)
	metadata clusterSet // complete before the first L2 entry is checked
	data     clusterSet
	packed   clusterSet // clusters that hold compressed data, which may share them
	starts   starts
	small    atomic.Int64 // how many offsets all tableCheck.small have
	next     atomic.Int64
	failed   atomic.Bool
}

func newValidator(im *Image, willRead func(off, length int64)) *validator {
	clusters := im.fileSize>>im.hdr.clusterBits + 1
	v := &validator{header: im.hdr, im: im, willRead: willRead, metadata: newClusterSet(clusters),
		data: newClusterSet(clusters), packed: newClusterSet(clusters)}
	v.starts.init(im.hdr, im.fileSize)
	return v
}

// run returns how many guest bytes the file stores uncompressed, and how many compressed. parallel
// is that of Options.
func (v *validator) run(ctx context.Context, parallel int) (plain, compressed int64, err error) {
	v.metadata.add(0, 1) // the header
	if err := v.claim("L1 table", v.l1Offset, int64(v.l1Size)*8); err != nil {
		return 0, 0, err
	}
	if err := v.refcounts(ctx, parallel > 1); err != nil {
		return 0, 0, err
	}
	var empty runList // parts of the guest without a table
	for i, e := range v.im.l1 {
		if e&l1Reserved != 0 {
			return 0, 0, bad("L1 entry %d has reserved bits set (%#x)", i, e)
		}
		off := int64(e & offsetMask)
		if off == 0 {
			if i == 0 || v.im.l1[i-1]&offsetMask != 0 {
				empty.begin(int64(i)*v.l2Entries(), KindUnallocated)
			}
			continue
		}
		if err := v.claim(fmt.Sprintf("L2 table %d", i), off, v.clusterSize()); err != nil {
			return 0, 0, err
		}
	}
	checks := make([]*tableCheck, min(runtime.GOMAXPROCS(0), maxChecks, len(v.im.l1)))
	if parallel > 1 {
		err = v.checkFar(ctx, checks, parallel)
	} else {
		err = v.checkNear(ctx, checks)
	}
	if err != nil {
		return 0, 0, err
	}
	runs := []runList{empty}
	for i := range checks {
		runs = append(runs, checks[i].runs)
		plain += checks[i].plainSize
		compressed += checks[i].compressedSize
	}
	if err := v.checkStarts(ctx, checks); err != nil {
		return 0, 0, err
	}
	if !v.extended() {
		v.im.runs = joinRuns(runs...)
	}
	return plain, compressed, nil
}

// checkNear checks all L2 tables. Each goroutine reads the tables that it checks.
func (v *validator) checkNear(ctx context.Context, checks []*tableCheck) error {
	for i := range min(tablesAhead, int64(len(v.im.l1))) {
		v.expect(i)
	}
	var group errgroup.Group
	for i := range checks {
		group.Go(func() error {
			checks[i] = v.newCheck()
			return checks[i].run(ctx)
		})
	}
	return group.Wait()
}

// newCheck is called by the goroutine that uses the result. Then the memory of two goroutines lies
// far apart, and their processors do not wait for each other's cache lines.
func (v *validator) newCheck() *tableCheck {
	return &tableCheck{validator: v}
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

// claim takes whole clusters for metadata.
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
		if v.metadata.add(n>>6, 1<<(n&63)) != 0 {
			return bad("the %s at %#x overlaps other metadata", what, off)
		}
	}
	return nil
}

// refcounts takes the clusters of the refcount table and its blocks, so nothing else may point
// there. The refcounts themselves are not needed.
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
