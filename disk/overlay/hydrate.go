package overlay

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
)

const (
	// checkpointEvery is how much is copied between two checkpoints of a durable disk. After a
	// crash, that much is copied again. Bytes.
	checkpointEvery = 256 << 20
	// hydrationChunk is how much a worker copies at once, unless the image has larger clusters. The
	// guest may have to wait for one chunk. Bytes.
	hydrationChunk = 1 << 20
	// writerFrom is how much must be left to copy to make a faster writer worth opening. Bytes.
	writerFrom = 64 << 20
	// spaceRetry and mediumRetry are the waits before hydration tries again after an error.
	spaceRetry  = time.Second
	mediumRetry = 30 * time.Second
)

// For a far image:
const (
	// farTimeout is how long a chunk may take to arrive. Then only one worker tries: more requests
	// do not bring the image back.
	farTimeout = 30 * time.Second
	// farRetry is the wait before that worker tries.
	farRetry = 5 * time.Second
	// farPiece is the smallest read of a chunk that is lost in part. Bytes.
	farPiece = 64 << 10
)

// hydration copies the blocks that a disk's file lacks while the guest works: first what the guest
// reads, then the rest in order. Its workers share slots with those of all other disks.
//
// One goroutine, the leader, runs the passes over the image. It waits for a slot, and recruits
// helpers for slots that no other disk wants, as long as the guest is idle. All of them take chunks
// by next, so that cursor and ahead alone say who copies what. A chunk that could not be copied is
// not remembered: its blocks stay clear in the map, and rewind or the next pass finds them again.
// Workers are held back in these cases:
//
//   - While the guest is active (watch), no helper goes on, and the leader rests after each step.
//   - Without space, paused stops the helpers. The leader tries again, until a chunk fits.
//   - If a far image is late or a part of it is lost, heldBack keeps all helpers away. Each chunk
//     that arrives lets one of them back.
//   - If the disk has failed, failure ends the pass, and run.
//
// A pass ends when the leader finds no chunk. It waits for the helpers, and then failure is final.
type hydration struct {
	o        *Disk
	log      *zap.Logger
	progress Progress // nil: unused
	begun    time.Time
	slots    *slots.Slots
	chunk    int64 // bytes read at once, a multiple of the map's granule
	workers  int
	retry    time.Duration // wait for space

	mu     sync.Mutex
	cursor int64 // guarded by mu; blocks before it were given to a worker
	ahead  int64 // guarded by mu; the block after the guest's last read; -1: none

	failMu  sync.Mutex
	failure error // guarded by failMu; the first error of this pass over the image

	follower Follower   // nil: unused
	writer   OpenWriter // nil: use out
	out      chunkWriter
	unsaved  atomic.Int64 // bytes that were copied since the last checkpoint
	helpers  atomic.Int32 // workers in addition to the leader
	paused   atomic.Bool  // there is no space

	far      bool         // the image is far away
	late     atomic.Bool  // the image is out of reach
	heldBack atomic.Int32 // how many workers may not help now
}

// chunkWriter writes parts of chunks to the disk's file.
type chunkWriter interface {
	Write(p []byte, off int64) error        // the fastest way
	WriteThrough(p []byte, off int64) error // through the page cache
}

func newHydration(o *Disk, opt CopyOptions) *hydration {
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	chunk := max(hydrationChunk, o.opt.Unit)
	workers := max(1, min(opt.Slots.Count(), int(maxBuffers/chunk)))
	if o.parallel > 1 {
		workers = min(workers, o.parallel)
	}
	return &hydration{o: o, log: opt.Log, progress: opt.Progress, follower: opt.Follower,
		writer: opt.Writer, slots: opt.Slots, chunk: chunk, workers: workers,
		retry: spaceRetry, ahead: -1, far: o.parallel > 1,
		out: rawfile.NewServedWriter(disk.WriterAt(context.Background(), o.file), nil, nil,
			rawfile.ServedWorth)}
}

// run returns nil when the file has every block, or ctx's error when ctx ends. It tries again after
// errors of storage, and returns the disk's failure.
func (h *hydration) run(ctx context.Context) error {
	h.begin(time.Now())
	if h.writer != nil && h.o.blocks.clear.Load()*h.o.granule >= writerFrom {
		out, done := h.writer(h.o.watch.active)
		defer done()
		h.out = out
	}
	for {
		failure := h.pass(ctx)
		if h.progress != nil && ctx.Err() == nil {
			h.progress.Missed(failure)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(failure, disk.ErrFailed) || errors.Is(failure, disk.ErrWrongContent):
			return failure
		case h.o.blocks.clear.Load() == 0:
			return nil
		}
		if failure != nil {
			h.log.Warn("a part of the image cannot be copied now: trying again later",
				zap.Error(failure), zap.Duration("after", mediumRetry))
			if err := slots.Rest(ctx, mediumRetry); err != nil {
				return err
			}
		}
	}
}

// begin records when copying begins: it is slow during the guest's first reads.
func (h *hydration) begin(now time.Time) {
	h.begun = now
	h.o.watch.activeAt.Store(now.Add(FirstReads - guestIdle).UnixNano())
}

// pass goes over the image once. It returns the disk's failure, or the first error of the image
// after it has tried the rest.
func (h *hydration) pass(ctx context.Context) error {
	h.rewind(0)
	h.failure = nil
	var helpers sync.WaitGroup
	for more := true; more && ctx.Err() == nil; {
		slot, err := h.slots.Acquire(ctx)
		if err != nil {
			break
		}
		var rest time.Duration
		for more && rest == 0 && slot.More() {
			h.recruit(ctx, &helpers)
			more, rest = h.step(ctx, slot)
		}
		slot.Release()
		if slots.Rest(ctx, rest) != nil {
			break
		}
	}
	helpers.Wait()
	h.failMu.Lock()
	defer h.failMu.Unlock()
	return h.failure
}

// recruit lets more workers help if no other disk wants their slots and the guest is idle.
func (h *hydration) recruit(ctx context.Context, group *sync.WaitGroup) {
	for h.mayHelp() && !h.o.watch.active() && !h.paused.Load() && h.hasMore() {
		first := h.slots.TryAcquire()
		if first == nil {
			return
		}
		h.helpers.Add(1)
		group.Go(func() {
			defer h.helpers.Add(-1)
			for slot, more := first, true; slot != nil; slot = h.slots.TryAcquire() {
				for more && slot.More() && !h.o.watch.active() {
					var rest time.Duration
					more, rest = h.step(ctx, slot)
					more = more && rest == 0 && !h.paused.Load() && ctx.Err() == nil
				}
				slot.Release()
				if !more || h.o.watch.active() {
					return
				}
			}
		})
	}
}

// mayHelp reports whether one more worker may help.
func (h *hydration) mayHelp() bool {
	return int(h.helpers.Load()) < h.workers-1-int(h.heldBack.Load())
}

// hasMore reports whether there are chunks behind the leader's next one.
func (h *hydration) hasMore() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.o.blocks.nextClear(h.cursor+h.chunk/h.o.granule) < h.o.blocks.blocks
}

// step copies one chunk. It reports whether there may be more, and how long to wait before the next
// step.
func (h *hydration) step(ctx context.Context, slot *slots.Slot) (more bool, rest time.Duration) {
	first, last, ok := h.next(ctx)
	if !ok {
		return false, 0
	}
	begin := time.Now()
	err := h.copyChunk(ctx, slot.Buffer(min(h.chunk, h.o.mapped)), first, last)
	now := time.Now()
	switch {
	case errors.Is(err, disk.ErrNoSpace):
		if h.pause(true) {
			h.log.Warn("no space is left to copy the image; it goes on when there is some, and "+
				"the disk works until then from the image", zap.Error(err))
		}
		h.o.giveBack(first, last)
		h.rewind(first)
		return true, max(h.retry, 1)
	case errors.Is(err, disk.ErrNotNow) && ctx.Err() == nil:
		if !h.late.Swap(true) {
			h.log.Warn("the image cannot be read now; copying continues when it can be",
				zap.Error(err))
		}
		h.heldBack.Store(int32(h.workers - 1))
		return true, farRetry // the next pass copies this chunk
	case err != nil:
		h.failMu.Lock()
		if h.failure == nil || errors.Is(err, disk.ErrFailed) ||
			errors.Is(err, disk.ErrWrongContent) {
			h.failure = err
		}
		h.failMu.Unlock()
		lost := errors.As(err, new(*disk.MediumError)) && !errors.Is(err, disk.ErrWrongContent)
		if lost && h.far { // all of the chunk may be lost: do not ask too often
			h.heldBack.Store(int32(h.workers - 1))
			return true, max(h.retry, 1)
		}
		return lost, 0
	}
	if h.far {
		h.arrived()
	}
	if h.pause(false) {
		h.log.Info("there is space again, the image is being copied")
	}
	if h.progress != nil && now.Sub(h.begun) >= logEvery && h.slots.MayLog(now, logEvery) {
		h.log.Info("copying the image", h.progress.Fields(now.Sub(h.begun))...)
	}
	return true, h.o.watch.rest(now.Sub(begin))
}

// arrived records that a chunk of a far image has arrived. One more worker may help now.
func (h *hydration) arrived() {
	if h.late.Swap(false) {
		h.log.Info("the image can be read again, and is being copied")
	}
	if held := h.heldBack.Load(); held > 0 {
		h.heldBack.CompareAndSwap(held, held-1)
	}
}

// pause records whether space is missing, and reports whether that is new.
func (h *hydration) pause(scarce bool) bool {
	if h.paused.Load() == scarce {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	news := h.paused.Swap(scarce) != scarce
	if news && h.progress != nil {
		h.progress.Wait(scarce)
	}
	return news
}

// rewind makes next return the blocks from one on again, as far as they were not copied.
func (h *hydration) rewind(block int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cursor = min(h.cursor, block)
}

// next gives a worker the blocks of a chunk that has something to copy.
func (h *hydration) next(ctx context.Context) (first, last int64, ok bool) {
	perChunk := h.chunk / h.o.granule
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		block := h.ahead
		h.ahead = -1
		if off, recent := h.o.watch.take(); recent {
			block = off / h.o.granule
		}
		if block < 0 {
			break
		}
		first = block / perChunk * perChunk
		if first >= h.o.blocks.blocks {
			continue
		}
		last = min(first+perChunk, h.o.blocks.blocks) - 1
		if !h.o.blocks.allSet(first, last) {
			h.ahead = last + 1 // most guests read on
			return first, last, true
		}
	}
	block := h.o.blocks.nextClear(h.cursor)
	if block >= h.o.blocks.blocks {
		h.cursor = block
		return 0, 0, false
	}
	first = max(block/perChunk*perChunk, h.cursor)
	end := block/perChunk*perChunk + perChunk
	if h.follower != nil && !h.far { // with a far image, the follower might have to wait
		n := h.follower.UntilChunk(ctx, block*h.o.granule)
		if n > 0 && n%h.o.granule == 0 && n <= h.chunk {
			first, end = block, block+n/h.o.granule
		}
	}
	last = min(end, h.o.blocks.blocks) - 1
	h.cursor = last + 1
	return first, last, true
}

// copyChunk copies those blocks of a chunk that are still in the image.
func (h *hydration) copyChunk(ctx context.Context, buf []byte, first, last int64) error {
	var failure error
	for first <= last {
		set, end := h.o.blocks.run(first, last)
		if !set {
			if err := h.copyRun(ctx, buf, first, end); err != nil {
				if !errors.As(err, new(*disk.MediumError)) {
					return err
				}
				failure = err
			}
		}
		first = end
	}
	return failure
}

// copyRun copies the blocks first to end-1. If the image cannot be read, it copies block by block,
// or in pieces if the image is far away, so that only unreadable parts are left out.
func (h *hydration) copyRun(ctx context.Context, buf []byte, first, end int64) error {
	o := h.o
	off := first * o.granule
	p := buf[:min(end*o.granule, o.Size())-off]
	if n, err := h.read(ctx, p, off); n < len(p) {
		if err == nil {
			return nil // meanwhile the guest has changed or read all of it
		}
		piece := int64(1)
		if h.far {
			piece = max(1, farPiece/o.granule)
		}
		if end-first <= piece || errors.Is(err, disk.ErrNotNow) {
			return err
		}
		var failure error
		for block := first; block < end; block += piece {
			if err := h.copyRun(ctx, buf, block, min(block+piece, end)); err != nil {
				if !errors.As(err, new(*disk.MediumError)) {
					return err
				}
				failure = err
			}
		}
		return failure
	}
	// not while the guest is active: it takes too long
	if h.follower != nil && !h.o.watch.active() {
		h.follower.Saw(ctx, p, off)
	}
	if err := h.keep(p, off); err != nil {
		return err
	}
	if o.maps.durable != nil && h.unsaved.Add(int64(len(p))) >= checkpointEvery {
		h.unsaved.Store(0)
		if err := o.Flush(); err != nil && !errors.Is(err, disk.ErrNoSpace) {
			return err
		}
	}
	return ctx.Err()
}

// read reads a part of a chunk.
func (h *hydration) read(ctx context.Context, p []byte, off int64) (int, error) {
	if h.far {
		patient, cancel := context.WithTimeout(ctx, farTimeout)
		defer cancel()
		ctx = patient
	}
	return h.o.readImage(ctx, p, off)
}

// keep stores a chunk.
func (h *hydration) keep(p []byte, off int64) error {
	if h.o.fate.failed.Load() {
		return disk.ErrFailed
	}
	return h.o.keep(p, off, h.write)
}

// write stores a part of a chunk. While the guest is active, it writes through the page cache: the
// guest soon reads again what it has just read, and has storage for itself. A guest that becomes
// active in the middle of a chunk of many parts does not wait for storage either.
func (h *hydration) write(p []byte, off int64) error {
	if h.o.watch.active() {
		return h.out.WriteThrough(p, off)
	}
	return h.out.Write(p, off)
}
