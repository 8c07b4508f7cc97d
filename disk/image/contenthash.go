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
	// fingerprintChunk is what is hashed at once. It is part of what the hash means. Bytes.
	fingerprintChunk = 1 << 20
	// offersLast is for how long after an offer more of them are waited for: storage may be slow.
	offersLast = time.Second
	// offersWorth is how much has to be offered in a second for offers to be waited for at all: a
	// disk that is slow to copy to, or rests beside its guest, must not keep its image from being
	// known soon. Bytes.
	offersWorth = 256 << 20
	// fromStorage is how long a chunk takes that comes from storage slow enough to be fought for:
	// 500 MB/s.
	fromStorage = 2 * time.Millisecond
)

// Hash hashes a file's chunks that are not all zeros, each with its offset, and adds the hashes up:
// so a hole and zeros that are stored give the same result, a hole costs nothing, and the order is
// free. Who reads the file for another reason offers what it has read, and the rest is read as soon
// as there are no offers, or few: the storage then has to give everything once only.
type Hash struct {
	bytes Source
	size  int64
	// pace is how long to leave the storage to the guest after a step that took so long; nil: there
	// is no guest.
	pace func(took time.Duration) time.Duration

	sum     atomic.Uint64
	noMore  chan struct{}
	pending sync.WaitGroup // what was taken from offers and is not in sum yet

	mu      sync.Mutex
	off     int64 // guarded by mu; everything before it was handed out
	dataEnd int64 // guarded by mu; to there the file is known to store something
	// guarded by mu; chunks that were handed out and could not be read
	again        []int64
	offered      *rawfile.Regions // guarded by mu; the chunks that were offered; nil: none
	offeredBytes int64            // guarded by mu; of these chunks
	first        time.Time        // guarded by mu; when the first of them came
	last         time.Time        // guarded by mu; when the last one came
}

func newHash(s Source) *Hash {
	return &Hash{bytes: s, size: s.Size(), noMore: make(chan struct{})}
}

// run returns the hash, after so many workers with slots have read what nobody offers. A source
// that is far away has as many as are worth it, which mostly wait, so that they have slots of their
// own. After an error, one of unread unless it is ctx's, another call goes on.
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
	c.pending.Wait() // everything was handed out, so that no more is taken
	return fmt.Sprintf("%016x", c.sum.Load()), nil
}

// offer is for who has read len(p) bytes at off of the file; only whole chunks are of use. Any
// number of goroutines, and not after endOffers.
func (c *Hash) offer(p []byte, off int64) {
	if off%fingerprintChunk != 0 || len(p) != fingerprintChunk || off+fingerprintChunk > c.size {
		return
	}
	if c.take(off, time.Now()) {
		defer c.pending.Done()
		c.sum.Add(chunkHash(p, off))
	}
}

// endOffers has the rest be read at once. It is called once.
func (c *Hash) endOffers() { close(c.noMore) }

// offersFor is for how long offers are to be waited for.
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

// waitForOffers returns when there are none any more, or with ctx's error when it ends before.
func (c *Hash) waitForOffers(ctx context.Context) error {
	for d := c.offersFor(); d > 0; d = c.offersFor() {
		timer := time.NewTimer(d)
		select {
		case <-timer.C:
		case <-c.noMore:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			break
		}
	}
	return ctx.Err()
}

// readNext adds the next chunk, and tells whether there was one, and how long to leave the storage
// to the guest then.
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
		c.again = append(c.again, off)
		return false, 0, err
	}
	c.sum.Add(chunkHash(p, off))
	return true, c.rest(time.Since(begin)), nil
}

// rest is how long to leave the storage to the guest after a chunk that took so long. What is in
// memory takes none of it, and is better done with soon.
func (c *Hash) rest(took time.Duration) time.Duration {
	if took < fromStorage || c.pace == nil {
		return 0
	}
	return c.pace(took)
}

// chunkHash is what the chunk p at off adds to the hash.
func chunkHash(p []byte, off int64) uint64 {
	if zero, n := rawfile.LeadingRun(p, 0); zero && n == len(p) {
		return 0
	}
	return xxh3.HashSeed(p, uint64(off))
}

// take reports whether the chunk at off, which is offered now, is the caller's to hash, as nobody
// else has it. Then it is pending. Also one that was read already tells that offers come: the
// copying may be behind the reading, which would else stay ahead of it.
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

// next returns where a chunk begins that is to be read; size if there are no more.
func (c *Hash) next() (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if last := len(c.again) - 1; last >= 0 {
		off := c.again[last]
		c.again = c.again[:last]
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

// storedLocked returns where the next chunk begins in which something is stored; size if there are
// no more.
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
			if end/fingerprintChunk*fingerprintChunk <= c.off { // it ends inside of this chunk
				c.dataEnd = end
			}
			end = end / fingerprintChunk * fingerprintChunk
			c.off = max(c.off, end)
		}
	}
	return c.off, nil
}

// ReadAlong offers what is copied of an image's disk to the hash of its file. It is the follower of
// a hydration.
type ReadAlong struct {
	img     *Image
	content *Hash
}

func NewReadAlong(img *Image, content *Hash) *ReadAlong {
	return &ReadAlong{img: img, content: content}
}

// UntilChunk is how many bytes from off on are copied best at once: those to where a chunk of the
// file begins, or of a whole chunk, if they lie there in one run with a whole chunk. 0: it does not
// matter.
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

// End says that nothing more is copied.
func (r *ReadAlong) End() { r.content.endOffers() }
