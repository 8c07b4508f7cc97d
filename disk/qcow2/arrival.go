package qcow2

import (
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Guest receives the content that an Arrival finds. Several goroutines call both methods, for
// ranges that do not overlap.
type Guest struct {
	// Write receives stored data and must not keep p. It never goes past the virtual size.
	Write func(p []byte, off int64) error
	// Zero receives ranges that the image stores as zeros. nil: ranges that are not written read as
	// zeros.
	Zero func(off, length int64) error
}

// Arrival reads an image whose file comes once, from its beginning to its end, as from a compressed
// archive. It writes each cluster to its place in the guest's disk as the cluster passes. So it
// must know the table that maps the cluster. Most programs put a table before the clusters that it
// maps, and one pass is enough. Clusters that pass before their table need another pass of the same
// file. Three passes are enough for any image.
//
// Arrival checks the header as Open does, and tables and entries as they come. It looks neither at
// refcounts nor at whether data shares a cluster with them: the result is a disk, not an image.
type Arrival struct {
	hdr      *header
	fileSize int64 // if unknown, the size of the largest possible image
	unknown  bool
	codec    codec
	guest    Guest

	passing    bool           // a pass has begun
	now        arrivalQueue   // of this pass
	later      arrivalQueue   // of the next pass
	window     *window        // readable in this pass
	starts     map[int64]bool // where data begins that is or was in the window
	manyStarts int
	metadata   clusterSet // the L2 tables
	kept       int64      // bytes of the tables in memory, with their tasks
	unused     sync.Pool  // of *arrivalJob
}

// lookBack is how many bytes of the passed data are kept. After a new L2 table, qemu-img goes on in
// the cluster in which it last packed compressed data. That cluster lies before the table.
func (a *Arrival) lookBack() int64 { return max(1<<20, 2*a.hdr.clusterSize()) }

const (
	// maxKeptTables bounds the tables in memory, with the order of their entries. It is enough for
	// an image of 1.3 TiB with clusters of 64 KiB and all tables at the front. Bytes.
	maxKeptTables = 256 << 20
	// keptTask is what a task takes in addition, in bytes: its struct, its places in queues, and
	// the allocator's rounding.
	keptTask = 256
)

// NewArrival reads the header from head, the beginning of the file. head has at least HeadSize
// bytes, or the whole file. If the size of the file is unknown (-1), Pass notices at the end of the
// file that something lies past it.
func NewArrival(head []byte, fileSize int64, opt Options) (*Arrival, error) {
	unknown := fileSize < 0
	if unknown {
		fileSize = largestFile(head)
	}
	h, err := readHeader(context.Background(), inMemory{bytes.NewReader(head)}, fileSize, opt)
	if err != nil {
		return nil, err
	}
	a := &Arrival{hdr: h, fileSize: fileSize, unknown: unknown,
		metadata: newClusterSet(fileSize>>h.clusterBits + 1)}
	a.codec.init(h)
	a.later = arrivalQueue{&arrivalTask{off: h.l1Offset}}
	return a, nil
}

// largestFile is the size of the largest file of an image with that beginning. Bytes.
func largestFile(head []byte) int64 {
	bits := uint32(minClusterBits)
	if len(head) >= 24 {
		bits = min(max(bits, binary.BigEndian.Uint32(head[20:])), maxClusterBits)
	}
	return maxClusters << bits
}

// inMemory is a Reader that never waits.
type inMemory struct{ r *bytes.Reader }

func (m inMemory) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return m.r.ReadAt(p, off)
}

// HeadSize is how many bytes of a file's beginning NewArrival needs.
const HeadSize = 1 << maxClusterBits

// Size is the virtual size in bytes.
func (a *Arrival) Size() int64 { return a.hdr.size }

// Backing returns the backing file that the image names, and its format. Both are claims; "" if
// there is none.
func (a *Arrival) Backing() (file, format string) { return a.hdr.backingFile, a.hdr.backingFormat }

// Done tells whether all content has been found.
func (a *Arrival) Done() bool { return a.passing && len(a.later) == 0 }

// arrivalTask is something to be read from the file: a part of the L1 table, or the target of the
// next entry of such a part or of an L2 table.
type arrivalTask struct {
	off   int64   // in the file
	index int64   // of the first L1 entry, or of the L2 table
	table bool    // raw is an L2 table
	raw   []byte  // a part of the L1 table, or an L2 table; nil: not read yet
	order []int32 // its entries in the order of the file; the first is next
	kept  int64   // bytes that the task takes
}

type arrivalQueue []*arrivalTask

func (q arrivalQueue) Len() int           { return len(q) }
func (q arrivalQueue) Less(i, j int) bool { return q[i].off < q[j].off }
func (q arrivalQueue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *arrivalQueue) Push(x any)        { *q = append(*q, x.(*arrivalTask)) }
func (q *arrivalQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// want queues a task for this pass, or for the next one if its place has already passed.
func (a *Arrival) want(t *arrivalTask) {
	if t.off < a.window.base {
		heap.Push(&a.later, t)
	} else {
		heap.Push(&a.now, t)
	}
}

// ClusterSize is the size of a cluster in bytes.
func (a *Arrival) ClusterSize() int64 { return a.hdr.clusterSize() }

// Pass reads the file once and gives the guest the content that it finds. It stops reading when it
// does not need the rest.
func (a *Arrival) Pass(ctx context.Context, in io.Reader, guest Guest) error {
	a.window = &window{in: in, keep: a.lookBack(), short: a.unknown}
	a.passing, a.guest = true, guest
	a.now, a.later = a.later, nil
	a.starts, a.manyStarts = make(map[int64]bool), minStarts
	group, ctx := errgroup.WithContext(ctx)
	jobs := make(chan *arrivalJob)
	group.Go(func() error {
		defer close(jobs)
		return a.read(ctx, a.window, jobs)
	})
	for range runtime.GOMAXPROCS(0) + 1 {
		group.Go(func() error { return a.work(ctx, jobs) })
	}
	return group.Wait()
}

const (
	// arrivalBatch is how many bytes of the file a worker gets at once, unless clusters are larger.
	arrivalBatch = 1 << 20
	// arrivalItems is how many clusters a worker gets at most. Compressed ones may take a byte
	// each.
	arrivalItems = 4096
	// arrivalGap is the largest gap between two parts of a batch. Bytes.
	arrivalGap = 64 << 10
	// l1Part is how many bytes of the L1 table are read at once.
	l1Part = 64 << 10
)

// read goes through the file and hands out the clusters that pass.
func (a *Arrival) read(ctx context.Context, w *window, jobs chan<- *arrivalJob) error {
	var batch *arrivalJob
	flush := func() error {
		if batch == nil {
			return nil
		}
		if err := batch.load(w, a.fileSize); err != nil {
			return err
		}
		select {
		case jobs <- batch:
			batch = nil
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for len(a.now) > 0 {
		t := a.now[0]
		if !t.table {
			if err := errors.Join(flush(), ctx.Err()); err != nil {
				return err
			}
			if err := a.load(w, t); err != nil {
				return err
			}
			continue
		}
		item, err := a.item(t)
		if err != nil {
			return err
		}
		if batch != nil && !batch.takes(item) {
			if err := flush(); err != nil {
				return err
			}
		}
		if batch == nil {
			if batch, _ = a.unused.Get().(*arrivalJob); batch == nil {
				batch = new(arrivalJob)
			}
			batch.begin, batch.end = item.off, item.off
		}
		batch.add(item)
		a.next()
	}
	return flush()
}

// next goes on to the next entry of the first task.
func (a *Arrival) next() {
	t := a.now[0]
	if t.order = t.order[1:]; len(t.order) == 0 {
		heap.Pop(&a.now)
		a.kept -= t.kept
		return
	}
	t.off = a.place(t, t.order[0])
	heap.Fix(&a.now, 0)
}

// load reads the part of the L1 table that is the first task, or the L2 table that the next entry
// of such a part names.
func (a *Arrival) load(w *window, t *arrivalTask) error {
	if t.raw == nil {
		heap.Pop(&a.now)
		return a.loadL1(w, t)
	}
	index, off := t.index+int64(t.order[0]), t.off
	a.next()
	return a.loadL2(w, index, off)
}

// loadL1 reads a part of the L1 table and queues its L2 tables.
func (a *Arrival) loadL1(w *window, t *arrivalTask) error {
	need := a.hdr.l1Need()
	data, err := w.at(t.off, min((need-t.index)*8, l1Part))
	if err != nil {
		return fmt.Errorf("reading the L1 table: %w", err)
	}
	raw := slices.Clone(data)
	var tables []int32
	for n := range int32(len(raw) / 8) {
		e, i := binary.BigEndian.Uint64(raw[n*8:]), t.index+int64(n)
		off := int64(e & offsetMask)
		switch {
		case e&l1Reserved != 0:
			return bad("L1 entry %d has reserved bits set (%#x)", i, e)
		case off == 0:
			continue
		case off&(a.hdr.clusterSize()-1) != 0:
			return bad("the L2 table %d at %#x is not aligned to a cluster", i, off)
		case off > a.fileSize-a.hdr.clusterSize():
			return bad("the L2 table %d at %#x runs past the end of the file", i, off)
		case a.inL1(off) || a.addMetadata(off):
			return bad("the L2 table %d at %#x overlaps other metadata", i, off)
		}
		tables = append(tables, n)
	}
	if next := t.index + int64(len(raw)/8); next < need {
		a.want(&arrivalTask{off: t.off + int64(len(raw)), index: next})
	}
	return a.keep(arrivalTask{index: t.index, raw: raw}, tables)
}

// keep queues the entries of a table, for this pass or for the next one.
func (a *Arrival) keep(t arrivalTask, entries []int32) error {
	if len(entries) == 0 {
		return nil
	}
	slices.SortFunc(entries, func(x, y int32) int {
		return cmp.Compare(a.place(&t, x), a.place(&t, y))
	})
	passed, _ := slices.BinarySearchFunc(entries, a.window.base, func(x int32, base int64) int {
		return cmp.Compare(a.place(&t, x), base)
	})
	raw := int64(len(t.raw)) // the task that lives longer has it
	for _, order := range [][]int32{entries[:passed], entries[passed:]} {
		if len(order) == 0 {
			continue
		}
		part := t
		part.order, part.off = order, a.place(&t, order[0])
		part.kept, raw = keptTask+int64(len(order))*4+raw, 0
		if a.kept += part.kept; a.kept > maxKeptTables {
			return unsupported("copy it as it is (--format original), or convert it to larger "+
				"clusters with \"qemu-img convert\"",
				"it has too many tables before its data to be expanded as it comes")
		}
		a.want(&part)
	}
	return nil
}

// addMetadata notes that an L2 table has the cluster at off. It reports false if another table has
// it.
func (a *Arrival) addMetadata(off int64) bool {
	return a.metadata.add(off >> a.hdr.clusterBits)
}

// inMetadata reports whether the cluster at off belongs to a table that was found.
func (a *Arrival) inMetadata(off int64) bool {
	return a.metadata.has(off>>a.hdr.clusterBits) || a.inL1(off)
}

func (a *Arrival) inL1(off int64) bool {
	return off < a.hdr.clusterSize() ||
		off+a.hdr.clusterSize() > a.hdr.l1Offset && off < a.hdr.l1Offset+int64(a.hdr.l1Size)*8
}

// loadL2 reads the L2 table at off and queues the clusters that it maps.
func (a *Arrival) loadL2(w *window, index, off int64) error {
	h := a.hdr
	first := index * h.l2Entries()
	n := min(h.l2Entries(), (h.size+h.clusterSize()-1)>>h.clusterBits-first)
	data, err := w.at(off, h.clusterSize())
	if err != nil {
		return fmt.Errorf("reading the L2 table at %#x: %w", off, err)
	}
	raw := slices.Clone(data[:n*h.entrySize()])
	var entries []int32
	for i := range n {
		e := binary.BigEndian.Uint64(raw[i*h.entrySize():])
		stored, err := a.check(raw, i, first+i, e)
		if err != nil {
			return err
		}
		if !stored {
			if err := a.zeros(raw, i, (first+i)<<h.clusterBits); err != nil {
				return err
			}
			continue
		}
		entries = append(entries, int32(i))
	}
	return a.keep(arrivalTask{index: index, table: true, raw: raw}, entries)
}

// hostOf returns where the data of an entry begins in the file.
func (a *Arrival) hostOf(e uint64) int64 {
	if e&entryCompressed != 0 {
		off, _ := a.hdr.compressedRange(e)
		return off
	}
	return int64(e & offsetMask)
}

// place returns where the target of a table's entry lies in the file.
func (a *Arrival) place(t *arrivalTask, entry int32) int64 {
	if !t.table {
		return int64(binary.BigEndian.Uint64(t.raw[entry*8:]) & offsetMask)
	}
	return a.hostOf(binary.BigEndian.Uint64(t.raw[int64(entry)*a.hdr.entrySize():]))
}

// check validates an L2 entry and tells whether it stores data.
func (a *Arrival) check(raw []byte, i, cluster int64, e uint64) (stored bool, err error) {
	h, guest := a.hdr, cluster<<a.hdr.clusterBits
	sub := uint64(0)
	if h.extended() {
		sub = binary.BigEndian.Uint64(raw[i*16+8:])
	}
	if e&entryCompressed != 0 {
		off, _ := h.compressedRange(e)
		switch {
		case sub != 0:
			return false, bad("the compressed cluster of guest offset %d has subclusters", guest)
		case off < h.clusterSize() || off >= a.fileSize:
			return false, bad("the compressed data of guest offset %d lies at %#x, outside of "+
				"the file", guest, off)
		}
		return true, nil
	}
	host, err := h.checkPlain(guest, e, sub, a.fileSize)
	switch {
	case err != nil || host == 0 || h.extended() && uint32(sub) == 0 || e&entryZero != 0:
		return false, err
	case a.inMetadata(host):
		return false, bad("the cluster of guest offset %d lies at %#x, in the metadata", guest,
			host)
	}
	return true, nil
}

// zeros reports the zeros of an entry without data to the guest.
func (a *Arrival) zeros(raw []byte, i, guest int64) error {
	if a.guest.Zero == nil {
		return nil
	}
	for within := int64(0); within < a.hdr.clusterSize() && guest+within < a.hdr.size; {
		p := a.hdr.entryPiece(raw, i, within)
		if p.kind == KindZero {
			if err := a.guest.Zero(guest+within, min(p.n, a.hdr.size-guest-within)); err != nil {
				return err
			}
		}
		within += p.n
	}
	return nil
}

// arrivalItem is the data of one cluster of the guest.
type arrivalItem struct {
	raw      []byte // the table
	i        int64  // of its entry
	entry    uint64
	guest    int64
	off, end int64 // in the file
}

func (a *Arrival) item(t *arrivalTask) (arrivalItem, error) {
	i, h := int64(t.order[0]), a.hdr
	e := binary.BigEndian.Uint64(t.raw[i*h.entrySize():])
	item := arrivalItem{raw: t.raw, i: i, entry: e,
		guest: (t.index*h.l2Entries() + i) << h.clusterBits}
	if e&entryCompressed != 0 {
		off, length := h.compressedRange(e)
		item.off, item.end = off, min(off+length, a.fileSize)
	} else {
		item.off = int64(e & offsetMask)
		item.end = item.off + h.clusterSize()
	}
	// A cluster must not use data again that another one has used: a small file could expand to any
	// size.
	if a.starts[item.off] {
		return item, bad("the data at %#x is used by more than one cluster", item.off)
	}
	if len(a.starts) >= a.manyStarts {
		maps.DeleteFunc(a.starts, func(off int64, _ bool) bool { return off < a.window.base })
		a.manyStarts = max(minStarts, 2*len(a.starts))
	}
	a.starts[item.off] = true
	return item, nil
}

// minStarts is how many starts are remembered before those out of the window are forgotten.
const minStarts = 1 << 16
