package overlay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
)

// Image is the read-only content below a disk. It may also be a disk.Estimator.
type Image interface {
	// ReadAt fills p or returns an error. It is not called past the end. For far content it waits
	// until ctx ends, and then returns disk.ErrNotNow.
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
	Size() int64
	// Extent describes the run that begins at off, at most length bytes of it. A hole is a range
	// that the image does not store. Extent waits like ReadAt.
	Extent(ctx context.Context, off, length int64) (disk.Extent, error)
	// Parallel is how many reads are worth having under way at once. 1 means that the image is near
	// and no caller waits for it.
	Parallel() int
}

// File is the disk's own sparse file, with the disk's size. It may also be a disk.Accountant.
type File interface {
	disk.Disk
	disk.Discarder
	disk.Zeroer
	disk.Extenter
}

// Disk is a disk above a read-only image, or a layer above another Disk (NewLayer). The content of
// a block is in the image, or the layer below, until the block is changed or copied; then it is in
// the disk's own file. It implements disk.Disk, Discarder, Zeroer, Extenter, Layered, Estimator,
// Accountant and Mapper.
//
// Invariant: a block is marked in the map only after its whole content is in the file, and is never
// unmarked. So a marked block needs no lock. The file's content below an unmarked block, of a
// failed or lost write, is never seen.
type Disk struct {
	file    File
	granule int64
	// bytes that the map covers: the image's size, rounded up to blocks. All content behind them is
	// in the file
	mapped  int64
	stored  int64 // bytes that the image stores, in whole blocks
	opt     Options
	blocks  *blockMap
	maps    *mapStore
	locks   blockLocks
	scratch sync.Pool // *[]byte of opt.Unit bytes
	fate    *fate
	// the disk is complete: the map's files are closed and are not used any more
	mapless atomic.Bool

	estimate disk.Estimator  // the image; nil: it is no Estimator
	accounts disk.Accountant // the file; nil: it is no Accountant

	base     imageUse
	parallel int // Image.Parallel; more than 1: the image is far away

	whole bool                 // the file is the whole disk, and never had an image
	lower atomic.Pointer[Disk] // the layer below; nil: none. Push does not replace it
	floor int64                // how many bytes of the layer below are visible through this one

	gate    sync.RWMutex // held while the guest changes the file and the map
	frozen  bool         // guarded by gate; the guest's changes are refused
	thaws   uint64       // guarded by gate; how often the layer was thawed
	settled atomic.Bool  // the layer is frozen, and was flushed since

	flushMu sync.Mutex     // one checkpoint at a time
	retired bool           // guarded by flushMu; the layer is not needed any more
	watch   *guestWatch    // shared with all layers
	trail   *rawfile.Trail // of the guest; shared with all layers
}

// fate is what has happened to a disk, shared by all of its layers.
type fate struct {
	failed atomic.Bool
	wrong  atomic.Pointer[error] // why the image's content is wrong; nil: it is not known to be
}

// Options say how a disk is used.
type Options struct {
	ReadOnly  bool // every write is refused
	CopyReads bool // keep in the file what is read from the image
	// Unit is how many bytes of the image are decoded, and so kept, together: a power of two. 0: a
	// block of the map.
	Unit int64
	// Reads is called with each range that the guest reads, or that a change of a part of a block
	// needs from the image, before the range is read. Any number of goroutines call it. nil:
	// unused.
	Reads func(off, length int64)
}

var (
	_ disk.Disk       = (*Disk)(nil)
	_ disk.Discarder  = (*Disk)(nil)
	_ disk.Zeroer     = (*Disk)(nil)
	_ disk.Extenter   = (*Disk)(nil)
	_ disk.Layered    = (*Disk)(nil)
	_ disk.Estimator  = (*Disk)(nil)
	_ disk.Accountant = (*Disk)(nil)
	_ disk.Mapper     = (*Disk)(nil)
)

// New puts a file above an image. m was begun with that image, and the disk closes it. The caller
// closes the image after the disk, or after Detach.
func New(file File, img Image, m *Map, opt Options) *Disk {
	return newDisk(file, img, m.blocks, m.files, m.stored, opt)
}

// newDisk is New with the parts of a map. The map has marks for all blocks in the file, and for
// those that the image does not store (markHoles). stored is the rest, in bytes.
func newDisk(file File, base Image, m *blockMap, maps *mapStore, stored int64, opt Options) *Disk {
	o := &Disk{file: file, granule: granuleFor(base.Size()), stored: stored, opt: opt,
		blocks: m, maps: maps, parallel: base.Parallel(), fate: new(fate), watch: new(guestWatch)}
	o.trail = rawfile.NewTrail(file.Size)
	o.base.init(base)
	o.mapped = m.blocks * o.granule
	o.estimate, _ = base.(disk.Estimator)
	o.accounts, _ = file.(disk.Accountant)
	o.opt.Unit = max(o.opt.Unit, o.granule)
	o.scratch.New = func() any {
		buf := make([]byte, o.opt.Unit)
		return &buf
	}
	return o
}

// blocksOf returns the number of blocks in the map of an image of that many bytes.
func blocksOf(size int64) int64 {
	granule := granuleFor(size)
	return (size + granule - 1) / granule
}

// markHoles marks the blocks of a new disk that the image does not store: the file has a hole
// there, which reads as the same zeros, and writes to marked blocks are faster. It returns the
// number of bytes of the other blocks.
//
// The marks are saved, although the image seems to say the same at each start. But a raw file may
// have a hole today, and stored zeros once it is copied. A write of the guest to such a block would
// be lost if the next start took the block for unmarked. An existing disk gets no new marks: a lost
// write may have left data in the file below an unmarked block.
func markHoles(ctx context.Context, base Image, m *blockMap, fresh bool) (stored int64,
	err error) {
	// hole: where the current hole begins
	size, granule, hole, holes := base.Size(), granuleFor(base.Size()), int64(0), int64(0)
	mark := func(end int64) {
		first := (hole + granule - 1) / granule
		last := end/granule - 1
		if end == size {
			last = m.blocks - 1
		}
		if fresh && first <= last {
			_ = m.set(first, last, nil) // only saving could fail
		}
		for first <= last {
			set, end := m.run(first, last)
			if set {
				holes += end - first
			}
			first = end
		}
	}
	for off := int64(0); off < size; {
		e, err := base.Extent(ctx, off, size-off)
		if err != nil {
			return 0, err
		}
		off += e.Length
		if e.Data {
			mark(off - e.Length)
			hole = off
		}
	}
	mark(size)
	return (m.blocks - holes) * granule, nil
}

// Copied returns how many of the image's stored bytes the file has, in whole blocks, and how many
// there are.
func (o *Disk) Copied() (done, total int64) {
	return o.stored - o.blocks.clear.Load()*o.granule, o.stored
}

// Size returns the size of the file, which may be larger than the image, and may grow.
func (o *Disk) Size() int64 { return o.file.Size() }

// span returns the blocks of the map that a range touches. If there is none, first > last.
func (o *Disk) span(off, length int64) (first, last int64) {
	return off / o.granule, (min(off+length, o.mapped)+o.granule-1)/o.granule - 1
}

// owned reports whether the file has the whole range.
func (o *Disk) owned(off, length int64) bool {
	first, last := o.span(off, length)
	return length == 0 || first > last || o.blocks.allSet(first, last)
}

// run returns whether the bytes from off on are in the file, and how many of them are in the same
// place, at most length.
func (o *Disk) run(off, length int64) (own bool, n int64) {
	if off >= o.mapped {
		return true, length
	}
	first, last := o.span(off, length)
	own, end := o.blocks.run(first, last)
	if end > last && own {
		return true, length // including the part behind the map
	}
	return own, min(length, end*o.granule-off)
}

// ReadAt returns the guest's writes, and elsewhere the image. Concurrency: as Disk.
func (o *Disk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 || off > o.Size()-int64(len(p)) {
		return 0, rawfile.OutOfRange("read", off, int64(len(p)), o.Size())
	}
	o.trail.Read(off, int64(len(p)))
	if o.whole {
		return o.file.ReadAt(ctx, p, off)
	}
	o.watch.touch()
	if o.opt.Reads != nil {
		o.opt.Reads(off, int64(len(p)))
	}
	return o.read(ctx, p, off)
}

// read fills p from the layers that have the blocks, and from the image.
func (o *Disk) read(ctx context.Context, p []byte, off int64) (int, error) {
	if err := o.condemned("read", off, int64(len(p))); err != nil {
		return 0, err
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		from, own, length := o.find(at, int64(len(p)-done))
		part := p[done : done+int(length)]
		n, err := len(part), error(nil)
		switch {
		case from == nil:
			clear(part)
		case own:
			n, err = from.file.ReadAt(ctx, part, at)
		case from.opt.CopyReads:
			n, err = from.readKeeping(ctx, part, at)
		default:
			n, err = from.readBase(ctx, part, at)
		}
		done += n
		if err != nil {
			return done, err
		}
	}
	return len(p), nil
}

// readBase reads the image. The range's blocks were unmarked a moment ago. If all of them are
// marked by now, readBase may return less than asked for without an error.
func (o *Disk) readBase(ctx context.Context, p []byte, off int64) (int, error) {
	o.watch.missed(off)
	return o.readForGuest(ctx, p, off)
}

// readForGuest is readImage for a call of the guest. Background work knows that the guest waits.
func (o *Disk) readForGuest(ctx context.Context, p []byte, off int64) (int, error) {
	if o.parallel > 1 {
		defer o.watch.wait()()
	}
	return o.readImage(ctx, p, off)
}

// readImage fills p from the image, and with zeros past its end. If the disk no longer needs the
// image, it returns 0 bytes without an error.
func (o *Disk) readImage(ctx context.Context, p []byte, off int64) (int, error) {
	base := o.base.begin()
	if base == nil {
		return 0, nil
	}
	defer o.base.end()
	inside := max(0, min(int64(len(p)), base.Size()-off))
	clear(p[inside:])
	if n, err := base.ReadAt(ctx, p[:inside], off); int64(n) < inside {
		if errors.Is(err, disk.ErrWrongContent) {
			o.Condemn(err)
		}
		return n, err
	}
	return len(p), nil
}

// WriteAt stores p in the file. If p covers a block only in part, the rest of the block is first
// read from the image. An empty write only checks whether the disk can be written. Monitoring makes
// such writes: they do not slow the copying down, and do not wait for Stack.Freeze, which may wait
// for storage that hangs. Concurrency and durability: as Disk.
func (o *Disk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	length := int64(len(p))
	if length > 0 {
		o.watch.touch()
	}
	if err := o.writable(off, length); err != nil {
		return 0, err
	}
	if off < 0 || off > o.Size()-length {
		return 0, rawfile.OutOfRange("write", off, length, o.Size())
	}
	if length == 0 {
		return o.file.WriteAt(ctx, p, off)
	}
	o.trail.Write(off, length)
	if o.owned(off, length) {
		if err := o.enter(); err != nil {
			return 0, err
		}
		defer o.leave()
		return o.file.WriteAt(ctx, p, off)
	}
	if err := o.change(ctx, changeWrite, p, off, length, o); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Discard makes the range a hole of the file. Concurrency and durability: as Disk.
func (o *Disk) Discard(ctx context.Context, off, length int64) error {
	return o.deallocate(ctx, changeDiscard, off, length)
}

// Zero makes the range read as zeros. Concurrency and durability: as Disk.
func (o *Disk) Zero(ctx context.Context, off, length int64) error {
	return o.deallocate(ctx, changeZero, off, length)
}

func (o *Disk) deallocate(ctx context.Context, op change, off, length int64) error {
	o.watch.touch()
	if err := o.writable(off, length); err != nil {
		return err
	}
	if off < 0 || length < 0 || off > o.Size()-length {
		return rawfile.OutOfRange(op.String(), off, length, o.Size())
	}
	var err error
	if !o.owned(off, length) {
		err = o.change(ctx, op, nil, off, length, o)
	} else if err = o.enter(); err == nil {
		err = o.apply(ctx, op, nil, off, length)
		o.leave()
	}
	if err == nil {
		o.trail.Discard(off, length)
	}
	return err
}

// Slow reports whether a read at off has to decompress. See Estimator.
func (o *Disk) Slow(off int64) bool {
	if off >= o.mapped || o.blocks.allSet(off/o.granule, off/o.granule) {
		return false
	}
	if o.estimate == nil || o.base.begin() == nil {
		return false
	}
	defer o.base.end()
	return o.estimate.Slow(off)
}

// Close closes the file and the map. The caller closes the image.
func (o *Disk) Close() error {
	if o.mapless.Load() {
		return o.file.Close()
	}
	return errors.Join(o.file.Close(), o.maps.close())
}

// Detach releases the map and the image. Call it when every block is in the file and the disk is
// recorded as complete. Then the image may be closed. An error comes from closing the map.
func (o *Disk) Detach() error {
	err := o.dropMaps()
	o.base.drop()
	return err
}

// Rest returns how long background work must rest after a step that took took, to leave storage and
// processors to the guest. It returns 0 if the guest is idle.
func (o *Disk) Rest(took time.Duration) time.Duration { return o.watch.rest(took) }

// dropMaps closes the map's files, when every block is marked and the disk is recorded as complete.
func (o *Disk) dropMaps() error {
	// A writer may still be about to save marks that were set before. Later writers save nothing,
	// because every page is full.
	held := o.locks.lock(0, o.blocks.blocks-1)
	defer o.locks.unlock(held)
	o.flushMu.Lock()
	defer o.flushMu.Unlock()
	o.mapless.Store(true)
	return o.maps.close()
}

// Condemn makes every later read and write fail: the content of the image was found to be wrong,
// and it is unknown what the guest has made of it. err says what is wrong.
func (o *Disk) Condemn(err error) { o.fate.wrong.CompareAndSwap(nil, &err) }

// condemned returns why a range cannot be used, or nil.
func (o *Disk) condemned(op string, off, length int64) error {
	why := o.fate.wrong.Load()
	if why == nil {
		return nil
	}
	return &disk.MediumError{Op: op, Off: off, Length: length,
		Err: fmt.Errorf("%w: %w", disk.ErrWrongContent, *why)}
}

// writable returns why nothing can be written, or nil.
func (o *Disk) writable(off, length int64) error {
	if err := o.condemned("write", off, length); err != nil {
		return err
	}
	if o.opt.ReadOnly {
		return disk.ErrReadOnly
	}
	if o.fate.failed.Load() {
		return disk.ErrFailed
	}
	return nil
}

// mark records that the file has the blocks.
func (o *Disk) mark(first, last int64) error { return o.blocks.set(first, last, o.maps.save) }

// Usage returns the usage of the disk's own file. Blocks that are only in the image take none of
// the disk's storage.
func (o *Disk) Usage() (disk.Usage, error) {
	if o.accounts == nil {
		return disk.Usage{}, errors.ErrUnsupported
	}
	return o.accounts.Usage()
}
