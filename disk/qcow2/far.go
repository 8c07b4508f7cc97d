package qcow2

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
)

const (
	// maxFarRead is how many bytes of a far file are read at once, unless a table is larger.
	maxFarRead = 1 << 20
	// maxFarReads bounds the bytes of all reads under way together.
	maxFarReads = 16 << 20
)

// tableRun is a run of L2 tables that are adjacent in the file, as indexes of the L1 table.
type tableRun []int64

// checkFar checks all L2 tables of a far file. It keeps as many reads under way as Options.Parallel
// says, and reads adjacent tables at once.
func (v *validator) checkFar(ctx context.Context, parallel int) error {
	var checking sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(min(parallel, int(maxFarReads/max(maxFarRead, v.clusterSize()))))
	for _, run := range v.tableRuns() {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			content, err := v.readRun(ctx, run)
			if err != nil {
				return err
			}
			checking.Lock()
			defer checking.Unlock()
			for n, entry := range run {
				if err := v.check(entry, content[int64(n)<<v.clusterBits:]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// tableRuns returns all L2 tables in the order of the file.
func (v *validator) tableRuns() (runs []tableRun) {
	place := func(entry int64) int64 { return int64(v.im.l1[entry] & offsetMask) }
	var all []int64
	for i := range int64(len(v.im.l1)) {
		if place(i) != 0 {
			all = append(all, i)
		}
	}
	slices.SortFunc(all, func(a, b int64) int { return cmp.Compare(place(a), place(b)) })
	most := max(maxFarRead>>v.clusterBits, 1)
	for begin, i := 0, 1; i <= len(all); i++ {
		full := i == len(all) || i-begin == most
		if full || place(all[i]) != place(all[i-1])+v.clusterSize() {
			runs = append(runs, all[begin:i])
			begin = i
		}
	}
	return runs
}

func (v *validator) readRun(ctx context.Context, run tableRun) ([]byte, error) {
	at, content := int64(v.im.l1[run[0]]&offsetMask), make([]byte, int64(len(run))<<v.clusterBits)
	if err := readFull(ctx, v.im.r, content, at); err != nil {
		return nil, fmt.Errorf("reading the L2 tables at %#x: %w", at, err)
	}
	return content, nil
}

// announceGap is the largest gap between two pieces that are announced as one. Bytes.
const announceGap = 16 << 10

// announce announces what a read of the range will read from the file, except the first piece,
// which is read at once. It announces pieces that lie together as one.
func (im *Image) announce(ctx context.Context, off, length int64) {
	if cluster := im.hdr.clusterSize(); off/cluster == (off+length-1)/cluster {
		return // a cluster is one piece
	}
	var begin, end int64 // of a piece that is not announced yet
	pieces := 0
	flush := func(from, to int64) {
		if pieces > 1 {
			im.willRead(begin, end-begin)
		}
		pieces++
		begin, end = from, to
	}
	for limit := off + length; off < limit; {
		run, err := im.locate(ctx, off, limit-off, true)
		if err != nil {
			return // the read will fail in the same way
		}
		off += run.n
		from, to := run.host, min(run.host+run.n, im.fileSize)
		if run.kind == KindCompressed {
			from, to = im.storedRange(run.entry)
		}
		switch {
		case run.kind != KindData && run.kind != KindCompressed || from >= to:
		case pieces > 1 && from >= begin && from <= end+announceGap:
			end = max(end, to)
		default:
			flush(from, to)
		}
	}
	flush(0, 0)
}
