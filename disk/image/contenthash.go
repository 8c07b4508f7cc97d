package image

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
)

const (
	// fingerprintChunk is how many bytes are hashed at once. The hash depends on it. Bytes.
	fingerprintChunk = 1 << 20
	// offersLast is how long to wait for the next offer. Storage may be slow.
	offersLast = time.Second
	// offersWorth is how many bytes a second must be offered, or waiting ends. A copy may be slow,
	// or pause for its guest. It must not delay the hash for long.
	offersWorth = 256 << 20
	// fromStorage is the time that a chunk takes from slow storage, at 500 MB/s. If a chunk takes
	// longer, the guest and the hash compete for storage.
	fromStorage = 2 * time.Millisecond
)

// Hash is the hash of a file's content: the sum of the hashes of its chunks, each taken together
// with the chunk's offset. Chunks of zeros are left out. So holes and stored zeros give the same
// result, holes cost nothing, and the order does not matter. A copy that reads the file anyway
// offers its data, and Hash reads the rest once the offers end or become few. So storage is read
// only once.
type Hash struct {
	bytes Source
	size  int64
	// pace says how long to leave the storage to the guest after a step that took took. It is nil
	// if there is no guest.
	pace func(took time.Duration) time.Duration

	sum     atomic.Uint64
	noMore  chan struct{}
	pending sync.WaitGroup // chunks that were offered and are not in sum yet

	mu      sync.Mutex
	off     int64 // guarded by mu; everything before it was given to a reader
	dataEnd int64 // guarded by mu; the file is known to store data up to here
	// guarded by mu; chunks that were given to a reader, but could not be read
	unread       []int64
	offered      *rawfile.Regions // guarded by mu; the chunks that were offered; nil: none
	offeredBytes int64            // guarded by mu; the size of these chunks
	first        time.Time        // guarded by mu; when the first of them came
	last         time.Time        // guarded by mu; when the last one came
}

func newHash(s Source) *Hash {
	return &Hash{bytes: s, size: s.Size(), noMore: make(chan struct{})}
}

// run returns the hash. That many workers, with slots of s, read the chunks that are not offered. A
// far source gets more workers, with slots of their own, since they mostly wait. After an error run
// can be called again, and goes on. Its errors are those of unread, or ctx's.
func (c *Hash) run(ctx context.Context, workers int, s *slots.Slots) (string, error) {
	if far := c.bytes.Parallel(); far > 1 {
		workers, s = far, slots.New(far, slots.Options{})
	}
	group, ctx := errgroup.WithContext(ctx)
	for range workers {
		group.Go(func() error {
			for more := true; more; {
				if err := c.waitForOffers(ctx); err != nil {
					return err
				}
				slot, err := s.Acquire(ctx)
				if err != nil {
					return err
				}
				var rest time.Duration
				for more && err == nil && rest == 0 && slot.More() && c.offersFor() <= 0 {
					more, rest, err = c.readNext(ctx, slot.Buffer(min(fingerprintChunk, c.size)))
				}
				slot.Release()
				if err == nil && more {
					err = slots.Rest(ctx, rest)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return "", err
	}
	c.pending.Wait() // every chunk was given to a reader, so no offer is accepted any more
	return fmt.Sprintf("%016x", c.sum.Load()), nil
}

// offer offers len(p) bytes that were read at off of the file. Only whole chunks are of use. Any
// number of goroutines may call it, but none after endOffers.
func (c *Hash) offer(p []byte, off int64) {
	if off%fingerprintChunk != 0 || len(p) != fingerprintChunk || off+fingerprintChunk > c.size {
		return
	}
	if c.take(off, time.Now()) {
		defer c.pending.Done()
		c.sum.Add(chunkHash(p, off))
	}
}

// endOffers says that no more offers come, so that run reads the rest at once. It is called once.
func (c *Hash) endOffers() { close(c.noMore) }

// offersFor is how long to wait for offers.
func (c *Hash) offersFor() time.Duration {
	select {
	case <-c.noMore:
		return 0
	default:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if sofar := now.Sub(c.first); sofar > offersLast && float64(c.offeredBytes) <
		offersWorth*sofar.Seconds() {
		return 0
	}
	return offersLast - now.Sub(c.last)
}

// waitForOffers returns when there are no more offers, or with ctx's error if ctx ends first.
func (c *Hash) waitForOffers(ctx context.Context) error {
	for d := c.offersFor(); d > 0; d = c.offersFor() {
		select {
		case <-time.After(d):
		case <-c.noMore:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return ctx.Err()
}

// readNext adds the next chunk. more is false if there was none. rest is how long to leave the
// storage to the guest afterwards.
func (c *Hash) readNext(ctx context.Context, buf []byte) (more bool, rest time.Duration,
	err error) {
	begin := time.Now()
	off, err := c.next()
	if err != nil || off == c.size {
		return false, 0, err
	}
	p := buf[:min(fingerprintChunk, c.size-off)]
	if err = ctx.Err(); err == nil {
		if err = readFull(ctx, c.bytes, p, off); err != nil {
			err = unread(ctx, off, int64(len(p)), err)
		}
	}
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.unread = append(c.unread, off)
		return false, 0, err
	}
	c.sum.Add(chunkHash(p, off))
	return true, c.rest(time.Since(begin)), nil
}

// rest is how long to leave the storage to the guest after a chunk that took took. A chunk from
// memory did not use storage, so rest is 0.
func (c *Hash) rest(took time.Duration) time.Duration {
	if took < fromStorage || c.pace == nil {
		return 0
	}
	return c.pace(took)
}

// chunkHash returns the value that the chunk p at off adds to the hash.
func chunkHash(p []byte, off int64) uint64 {
	if zero, n := rawfile.LeadingRun(p, 0); zero && n == len(p) {
		return 0
	}
	return xxh3.HashSeed(p, uint64(off))
}

// take notes an offer of the chunk at off. It reports whether the caller should hash the chunk:
// false if a reader has it. The chunk is then pending. A chunk that a reader had before still
// counts as an offer. Otherwise a reader that is ahead of the copying would stay ahead of it.
func (c *Hash) take(off int64, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wasOfferedLocked(off) {
		return false
	}
	if c.offered == nil {
		c.offered = rawfile.NewRegions(c.size, fingerprintChunk)
	}
	c.offered.Add(off, fingerprintChunk)
	c.offeredBytes += fingerprintChunk
	c.last = now
	if c.first.IsZero() {
		c.first = now
	}
	if off < c.off {
		return false
	}
	c.pending.Add(1)
	return true
}

func (c *Hash) wasOfferedLocked(off int64) bool {
	return c.offered != nil && c.offered.Covers(off, 1)
}

// next returns the offset of the next chunk to read, or size if there are no more.
func (c *Hash) next() (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if last := len(c.unread) - 1; last >= 0 {
		off := c.unread[last]
		c.unread = c.unread[:last]
		return off, nil
	}
	for {
		off, err := c.storedLocked()
		if err != nil {
			return 0, &disk.MediumError{Op: "read", Off: c.off, Length: c.size - c.off, Err: err}
		}
		c.off = min(off+fingerprintChunk, c.size)
		if off == c.size || !c.wasOfferedLocked(off) {
			return off, nil
		}
	}
}

// storedLocked returns the offset of the next chunk that has data, or size if there is none.
func (c *Hash) storedLocked() (int64, error) {
	for c.off < c.size && c.off >= c.dataEnd {
		e, err := c.bytes.Extent(c.off, c.size-c.off)
		end := c.off + e.Length
		switch {
		case err != nil:
			return 0, err
		case e.Data:
			c.dataEnd = end
		case end == c.size:
			c.off = c.size
		default:
			if end/fingerprintChunk*fingerprintChunk <= c.off { // the hole ends inside this chunk
				c.dataEnd = end
			}
			end = end / fingerprintChunk * fingerprintChunk
			c.off = max(c.off, end)
		}
	}
	return c.off, nil
}

// ReadAlong offers the data that a hydration copies from an image's disk to the hash of the image's
// file.
type ReadAlong struct {
	img     *Image
	content *Hash
}

func NewReadAlong(img *Image, content *Hash) *ReadAlong {
	return &ReadAlong{img: img, content: content}
}

// UntilChunk returns how many bytes from off on are best copied at once, or 0 if it does not
// matter: those up to the end of the file's chunk at off. It is 0 unless the file stores these
// bytes, and a whole chunk, in one run.
func (r *ReadAlong) UntilChunk(ctx context.Context, off int64) int64 {
	at, n, ok := r.img.stored(ctx, off, 2*fingerprintChunk)
	if !ok {
		return 0
	}
	ahead := fingerprintChunk - at%fingerprintChunk
	if ahead == fingerprintChunk && n >= ahead || n >= ahead+fingerprintChunk {
		return ahead
	}
	return 0
}

// Saw offers len(p) bytes of the disk at off.
func (r *ReadAlong) Saw(ctx context.Context, p []byte, off int64) {
	if len(p) != fingerprintChunk {
		return
	}
	at, n, ok := r.img.stored(ctx, off, fingerprintChunk)
	if ok && n == fingerprintChunk {
		r.content.offer(p, at)
	}
}

// End says that the copying is over.
func (r *ReadAlong) End() { r.content.endOffers() }
