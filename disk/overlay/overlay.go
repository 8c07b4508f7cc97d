package overlay

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
)

// Image is the read-only content that a disk lies over. It may be a disk.Estimator, too, and is
// asked once.
type Image interface {
	// ReadAtContext fills p or returns an error; it is not called past the end. If it has to wait
	// for content that is far away, it does so until ctx ends, and returns disk.ErrNotNow then.
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
	Size() int64
	// Extent describes the run that begins at off, at most length bytes of it. A hole is what the
	// image does not store. It waits as ReadAtContext does.
	Extent(ctx context.Context, off, length int64) (disk.Extent, error)
	// Parallel is how many reads are worth having on their way at once, because the image is far
	// away. 1: it is near, and never waited for.
	Parallel() int
}

// File is the disk's own content: a file, sparse, of the disk's size. It may be a disk.Accountant,
// too.
type File interface {
	disk.Disk
	disk.Discarder
	disk.Zeroer
	disk.Extenter
	disk.Syncer
}

// Disk is a disk over a read-only image. A block of the map has its content either in the disk's
// own file or, as long as nobody changed or copied it, in the image. It implements disk.Disk,
// Discarder, Zeroer, Extenter, Syncer, Estimator and Accountant.
//
// What holds it together: a block is marked in the map only after its whole content is in the file,
// and is never unmarked. So a marked block needs no lock, and what a failed or lost write left in
// the file below a block that is not marked is never seen.
type Disk struct {
	file    File
	granule int64
	// bytes that the map covers: the image's size, rounded up to blocks; what lies behind is in the
	// file
	mapped  int64
	stored  int64 // bytes that the image stores, in whole blocks
	opt     Options
	blocks  *blockMap
	maps    *mapStore
	locks   blockLocks
	scratch sync.Pool // *[]byte of opt.Unit bytes
	failed  atomic.Bool
	// the disk is complete: the map's files are closed, and say nothing any more
	mapless atomic.Bool

	estimate disk.Estimator  // of the image; nil: it is none
	accounts disk.Accountant // of the file; nil: it is none

	base     imageUse
	parallel int // of the image; more than 1: it is far away

	flushMu sync.Mutex // one checkpoint at a time
	watch   guestWatch
}

// Options say how a disk is used.
type Options struct {
	ReadOnly  bool // every write is refused
	CopyReads bool // what is read from the image is kept in the file
	// Unit is what of the image is decoded as a whole, and so kept as a whole. Bytes: a power of
	// two. 0: a block of the map.
	Unit int64
}

var (
	_ disk.Disk       = (*Disk)(nil)
	_ disk.Discarder  = (*Disk)(nil)
	_ disk.Zeroer     = (*Disk)(nil)
	_ disk.Extenter   = (*Disk)(nil)
	_ disk.Syncer     = (*Disk)(nil)
	_ disk.Estimator  = (*Disk)(nil)
	_ disk.Accountant = (*Disk)(nil)
)

// New puts a file over an image. The map has been begun with that image; from now on it is the
// disk's to close. The image stays the caller's, who closes it after the disk, or after Detach.
func New(file File, img Image, m *Map, opt Options) *Disk {
	return newDisk(file, img, m.blocks, m.files, m.stored, opt)
}

// newDisk is New for a map in its parts. It knows what the file holds already, and what the image
// does not store (markHoles), which leaves stored bytes of it.
func newDisk(file File, base Image, m *blockMap, maps *mapStore, stored int64, opt Options) *Disk {
	o := &Disk{file: file, granule: granuleFor(base.Size()), stored: stored, opt: opt,
		blocks: m, maps: maps, parallel: base.Parallel()}
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

// blocksOf is how many blocks the map of an image of that many bytes has.
func blocksOf(size int64) int64 {
	granule := granuleFor(size)
	return (size + granule - 1) / granule
}

// markHoles marks the blocks of which the image stores nothing, as a hole in the file reads the
// same, and returns how many bytes the others have. What is marked has to be saved like any other
// mark, because the guest may write there from now on: whether a raw file has a hole somewhere or
// stores zeros can differ from one start to the next.
func markHoles(ctx context.Context, base Image, m *blockMap,
	save func(page, word int64, words []byte) error,
) (stored int64, err error) {
	// hole: where the current one begins
	size, granule, hole, holes := base.Size(), granuleFor(base.Size()), int64(0), int64(0)
	mark := func(end int64) error {
		first := (hole + granule - 1) / granule
		last := end/granule - 1
		if end == size {
			last = m.blocks - 1
		}
		if first > last {
			return nil
		}
		if !m.allSet(first, last) {
			if err := m.set(first, last, save); err != nil && !errors.Is(err, disk.ErrNoSpace) {
				return err
			}
		}
		// a hole that cannot be saved for lack of space is read from the image as before
		for first <= last {
			set, end := m.run(first, last)
			if set {
				holes += end - first
			}
			first = end
		}
		return nil
	}
	for off := int64(0); off < size; {
		e, err := base.Extent(ctx, off, size-off)
		if err != nil {
			return 0, err
		}
		off += e.Length
		if e.Data {
			if err := mark(off - e.Length); err != nil {
				return 0, err
			}
			hole = off
		}
	}
	err = mark(size)
	return (m.blocks - holes) * granule, err
}

// Copied is how many of the bytes that the image stores the file has, in whole blocks, of how many.
func (o *Disk) Copied() (done, total int64) {
	return o.stored - o.blocks.clear.Load()*o.granule, o.stored
}

// Size is that of the file, which may be larger than the image.
func (o *Disk) Size() int64 { return o.file.Size() }

// span is the blocks of the map that a range touches; first > last if none.
func (o *Disk) span(off, length int64) (first, last int64) {
	return off / o.granule, (min(off+length, o.mapped)+o.granule-1)/o.granule - 1
}

// owned reports whether the file has the whole range.
func (o *Disk) owned(off, length int64) bool {
	first, last := o.span(off, length)
	return length == 0 || first > last || o.blocks.allSet(first, last)
}

// run describes the bytes from off on that are all in the file or all in the image, at most length
// of them.
func (o *Disk) run(off, length int64) (own bool, n int64) {
	if off >= o.mapped {
		return true, length
	}
	first, last := o.span(off, length)
	own, end := o.blocks.run(first, last)
	if end > last && own {
		return true, length // with what lies behind the map
	}
	return own, min(length, end*o.granule-off)
}

// ReadAt reads what the guest wrote, and the image where it wrote nothing. Concurrency: as Disk.
func (o *Disk) ReadAt(p []byte, off int64) (int, error) {
	return o.readAt(context.Background(), p, off)
}

func (o *Disk) readAt(ctx context.Context, p []byte, off int64) (int, error) {
	o.watch.touch()
	if off < 0 || off > o.Size()-int64(len(p)) {
		return 0, rawfile.OutOfRange("read", off, int64(len(p)), o.Size())
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		own, length := o.run(at, int64(len(p)-done))
		part := p[done : done+int(length)]
		n, err := 0, error(nil)
		switch {
		case own:
			n, err = o.file.ReadAt(part, at)
		case o.opt.CopyReads:
			n, err = o.readKeeping(ctx, part, at)
		default:
			n, err = o.readBase(ctx, part, at)
		}
		done += n
		if err != nil {
			return done, err
		}
	}
	return len(p), nil
}

// readBase reads the image, whose blocks in the range were not marked a moment ago. It may return
// less than asked for, without an error, when they all are by now.
func (o *Disk) readBase(ctx context.Context, p []byte, off int64) (int, error) {
	o.watch.missed(off)
	return o.readForGuest(ctx, p, off)
}

// readForGuest is readImage for a call of the guest, which may wait for it.
func (o *Disk) readForGuest(ctx context.Context, p []byte, off int64) (int, error) {
	if o.parallel > 1 {
		defer o.watch.wait()()
	}
	return o.readImage(ctx, p, off)
}

// readImage fills p from the image: past its end there are zeros. When the image is not needed any
// more, it returns 0 bytes without an error.
func (o *Disk) readImage(ctx context.Context, p []byte, off int64) (int, error) {
	base := o.base.begin()
	if base == nil {
		return 0, nil
	}
	defer o.base.end()
	inside := max(0, min(int64(len(p)), base.Size()-off))
	clear(p[inside:])
	if n, err := base.ReadAtContext(ctx, p[:inside], off); int64(n) < inside {
		return n, err
	}
	return len(p), nil
}

// WriteAt stores p in the file. Where it covers a block only in part, the rest comes from the image
// first. A write of nothing only says whether the disk can be written: whoever watches asks so, and
// that does not slow the copying down. Concurrency and durability: as Disk.
func (o *Disk) WriteAt(p []byte, off int64) (int, error) {
	return o.writeAt(context.Background(), p, off)
}

func (o *Disk) writeAt(ctx context.Context, p []byte, off int64) (int, error) {
	if len(p) > 0 {
		o.watch.touch()
	}
	if err := o.writable(); err != nil {
		return 0, err
	}
	length := int64(len(p))
	if off < 0 || off > o.Size()-length {
		return 0, rawfile.OutOfRange("write", off, length, o.Size())
	}
	if o.owned(off, length) {
		return o.file.WriteAt(p, off)
	}
	if err := o.change(ctx, changeWrite, p, off, length); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Discard makes the range a hole of the file. Concurrency and durability: as Disk.
func (o *Disk) Discard(off, length int64) error {
	return o.deallocate(context.Background(), changeDiscard, off, length)
}

// Zero makes the range read as zeros. Concurrency and durability: as Disk.
func (o *Disk) Zero(off, length int64) error {
	return o.deallocate(context.Background(), changeZero, off, length)
}

func (o *Disk) deallocate(ctx context.Context, op change, off, length int64) error {
	o.watch.touch()
	if err := o.writable(); err != nil {
		return err
	}
	if off < 0 || length < 0 || off > o.Size()-length {
		return rawfile.OutOfRange(op.String(), off, length, o.Size())
	}
	if o.owned(off, length) {
		return o.apply(op, nil, off, length)
	}
	return o.change(ctx, op, nil, off, length)
}

// Extent describes what is allocated in the file or stored in the image. Concurrency: as Disk.
func (o *Disk) Extent(off, length int64) (disk.Extent, error) {
	return o.extent(context.Background(), off, length)
}

func (o *Disk) extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	if off < 0 || length <= 0 || off > o.Size()-length {
		return disk.Extent{}, rawfile.OutOfRange("extent", off, length, o.Size())
	}
	own, n := o.run(off, length)
	if own {
		return o.file.Extent(off, n)
	}
	base := o.base.begin()
	if base == nil {
		return o.file.Extent(off, n)
	}
	defer o.base.end()
	if off >= base.Size() {
		return disk.Extent{Length: n}, nil
	}
	return base.Extent(ctx, off, min(n, base.Size()-off))
}

// Slow reports whether a read at off has to be decompressed. See Estimator.
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

// Close closes the file and the map. The image is the caller's to close.
func (o *Disk) Close() error {
	if o.mapless.Load() {
		return o.file.Close()
	}
	return errors.Join(o.file.Close(), o.maps.close())
}

// Detach lets go of the map and the image, when every block is in the file and the disk is known to
// be complete without them. The image may be closed then. An error is one of closing the map.
func (o *Disk) Detach() error {
	err := o.dropMaps()
	o.base.drop()
	return err
}

// Rest is how long what goes on beside the guest, and took so long for a step of its own, leaves
// storage and processors to the guest before the next one: 0 where that does nothing.
func (o *Disk) Rest(took time.Duration) time.Duration { return o.watch.rest(took) }

// dropMaps closes the map's files, when every block is marked and the disk is known to be complete
// without them.
func (o *Disk) dropMaps() error {
	// Who marks blocks that had been marked meanwhile may still be about to save that. Later ones
	// save nothing: every page is full.
	held := o.locks.lock(0, o.blocks.blocks-1)
	defer o.locks.unlock(held)
	o.flushMu.Lock()
	defer o.flushMu.Unlock()
	o.mapless.Store(true)
	return o.maps.close()
}

// writable returns why nothing can be written at all, or nil.
func (o *Disk) writable() error {
	if o.opt.ReadOnly {
		return disk.ErrReadOnly
	}
	if o.failed.Load() {
		return disk.ErrFailed
	}
	return nil
}

// mark records that the file has the blocks.
func (o *Disk) mark(first, last int64) error { return o.blocks.set(first, last, o.maps.save) }

// Usage is that of the disk's own file: what still lies in the image takes nothing of the storage
// that the disk is on.
func (o *Disk) Usage() (disk.Usage, error) {
	if o.accounts == nil {
		return disk.Usage{}, errors.ErrUnsupported
	}
	return o.accounts.Usage()
}
