package disktest

import (
	"context"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
)

// DistantBlock is in which units a Distant has content here or far away. Bytes.
const DistantBlock = 4 << 10

// Distant is a disk whose content is far away at first. Content that was read or written once is
// here. It behaves like the network between the two: see Slow, Cut, Refuse and Restore.
type Distant struct {
	inner disk.Disk

	mu      sync.Mutex
	here    map[int64]struct{} // guarded by mu; blocks by their number
	link    link               // guarded by mu
	delay   time.Duration      // guarded by mu; of each fetch
	changed chan struct{}      // guarded by mu; closed when link changes
	waiting int                // guarded by mu; calls
	refused int                // guarded by mu; answers
}

// link is how the network behaves.
type link int

const (
	linkUp link = iota
	linkCut
	linkRefuses
)

var (
	_ disk.Discarder = (*Distant)(nil)
	_ disk.Zeroer    = (*Distant)(nil)
	_ disk.Extenter  = (*Distant)(nil)
	_ disk.Layered   = (*Distant)(nil)
)

// NewDistant makes a disk with the content of inner, which has every optional interface of Memory.
// The content is available at once.
func NewDistant(inner *Memory) *Distant {
	return &Distant{inner: inner, here: make(map[int64]struct{}), changed: make(chan struct{})}
}

// Slow makes each fetch of content take so long.
func (d *Distant) Slow(delay time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.delay = delay
}

// Cut makes calls wait that need content from afar.
func (d *Distant) Cut() { d.set(linkCut) }

// Refuse makes such calls say disk.ErrNotNow at once.
func (d *Distant) Refuse() { d.set(linkRefuses) }

// Restore ends Cut and Refuse.
func (d *Distant) Restore() { d.set(linkUp) }

// Forget puts all content far away again.
func (d *Distant) Forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.here)
}

func (d *Distant) set(l link) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.link = l
	close(d.changed)
	d.changed = make(chan struct{})
}

// Waiting is how many calls wait for content.
func (d *Distant) Waiting() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.waiting
}

// Refused is how many calls were told disk.ErrNotNow before their time.
func (d *Distant) Refused() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.refused
}

// fetch brings the blocks that hold a range here, and tells how many bytes from the beginning of it
// are here at least.
func (d *Distant) fetch(ctx context.Context, off, length int64) (int64, error) {
	for at := off; at < off+length; at = (at/DistantBlock + 1) * DistantBlock {
		if err := d.fetchBlock(ctx, at/DistantBlock); err != nil {
			return at - off, err
		}
	}
	return length, nil
}

func (d *Distant) fetchBlock(ctx context.Context, block int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting++
	defer func() { d.waiting-- }()
	for {
		if _, ok := d.here[block]; ok {
			return nil
		}
		if ctx.Err() != nil {
			return disk.ErrNotNow
		}
		wait := (<-chan time.Time)(nil)
		switch {
		case d.link == linkRefuses && ctx.Done() != nil:
			d.refused++
			return disk.ErrNotNow
		case d.link == linkUp && d.delay == 0:
			d.here[block] = struct{}{}
			return nil
		case d.link == linkUp:
			wait = time.After(d.delay)
		}
		changed := d.changed
		d.mu.Unlock()
		arrived := false
		select {
		case <-ctx.Done():
		case <-changed:
		case <-wait:
			arrived = true
		}
		d.mu.Lock()
		if arrived {
			d.here[block] = struct{}{}
		}
	}
}

// keep notes that the blocks wholly inside a range are here: their former content is not needed.
func (d *Distant) keep(off, length int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	first, end := (off+DistantBlock-1)/DistantBlock, (off+length)/DistantBlock
	for block := first; block < end; block++ {
		d.here[block] = struct{}{}
	}
}

// Far implements disk.Far.
func (d *Distant) Far() bool { return true }

func (d *Distant) Size() int64  { return d.inner.Size() }
func (d *Distant) Flush() error { return d.inner.Flush() }
func (d *Distant) Close() error { return d.inner.Close() }

func (d *Distant) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if _, err := d.fetch(ctx, off, int64(len(p))); err != nil {
		return 0, err
	}
	return d.inner.ReadAt(ctx, p, off)
}

// WriteAt goes block by block, so that one that gives up has stored the blocks before.
func (d *Distant) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		at := off + int64(done)
		n := min(DistantBlock-int(at%DistantBlock), len(p)-done)
		if err := d.prepare(ctx, at, int64(n)); err != nil {
			return done, err
		}
		n, err := d.inner.WriteAt(ctx, p[done:done+n], at)
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// prepare fetches the parts of blocks that a change of a range keeps.
func (d *Distant) prepare(ctx context.Context, off, length int64) error {
	if end := off + length; off%DistantBlock != 0 || end%DistantBlock != 0 {
		if _, err := d.fetch(ctx, off, 1); err != nil {
			return err
		}
		if _, err := d.fetch(ctx, end-1, 1); err != nil {
			return err
		}
	}
	d.keep(off, length)
	return nil
}

func (d *Distant) Discard(ctx context.Context, off, length int64) error {
	if err := d.prepare(ctx, off, length); err != nil {
		return err
	}
	return d.inner.(disk.Discarder).Discard(ctx, off, length)
}

func (d *Distant) Zero(ctx context.Context, off, length int64) error {
	if err := d.prepare(ctx, off, length); err != nil {
		return err
	}
	return d.inner.(disk.Zeroer).Zero(ctx, off, length)
}

// Extent waits for the block at off, as if only the far side knew what is allocated.
func (d *Distant) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	if _, err := d.fetch(ctx, off, 1); err != nil {
		return disk.Extent{}, err
	}
	return d.inner.(disk.Extenter).Extent(ctx, off, length)
}

// Depth waits as Extent does. All that has come is the disk's own.
func (d *Distant) Depth(ctx context.Context, off, length int64) (depth int, n int64, err error) {
	if _, err := d.fetch(ctx, off, 1); err != nil {
		return 0, 0, err
	}
	return disk.DepthOwn, min(length, DistantBlock-off%DistantBlock), nil
}
