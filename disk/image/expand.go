package image

import (
	"cmp"
	"context"
	"runtime"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

const (
	// chunkSize is how many bytes a worker reads at once, unless the image has larger clusters.
	chunkSize = 2 << 20
	// farChunkSize is chunkSize for a far image, of which more chunks are read at once.
	farChunkSize = 1 << 20
	// maxCopyBuffers bounds the memory of all workers' buffers. Bytes.
	maxCopyBuffers = 16 << 20
)

// copier expands an image into a sparse raw file. One goroutine walks the extents and hands out
// chunks in order. The workers read, decode and write them side by side. Every cluster is decoded
// once.
type copier struct {
	img      *Image
	to       *Destination // nil: only count what would be written
	progress *Progress
	chunk    int64
	workers  int
	written  atomic.Int64
}

// job is a part of one chunk for a worker.
type job struct {
	off, length int64
	data        int64 // bytes of it that the image stores
	covered     int64 // bytes that are done after this job, with the hole before it
}

// newCopier prepares an expansion with at most that many workers. 0 means four more than there are
// processors: the processors go on decoding while some workers write or wait for storage.
func newCopier(img *Image, to *Destination, p *Progress, workers int) *copier {
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0) + 4
	}
	p = cmp.Or(p, new(Progress))
	c := &copier{img: img, to: to, progress: p, chunk: chunkSize}
	if far := img.Parallel(); far > 1 {
		c.chunk, workers = farChunkSize, max(workers, far)
	}
	// A compressed cluster is decoded as a whole, so a chunk holds whole clusters of every layer.
	img.top.chain(func(l *layer) { c.chunk = max(c.chunk, l.header.clusterSize) })
	c.workers = max(1, min(workers, int(maxCopyBuffers/c.chunk)))
	return c
}

// run copies everything. It returns how many bytes it wrote. The rest of the file is holes.
func (c *copier) run(ctx context.Context) (written int64, err error) {
	c.progress.Start(c.img.Size(), c.img.use.total())
	store := rawfile.Count
	if c.to != nil {
		if err := c.to.clear(ctx, c.img.Size()); err != nil {
			return 0, err
		}
		out, done := c.to.writer(true)
		defer done()
		store = out.Store
	}
	group, ctx := errgroup.WithContext(ctx)
	jobs := make(chan job)
	group.Go(func() error {
		defer close(jobs)
		return c.walk(ctx, func(j job) error {
			select {
			case jobs <- j:
				return nil
			case <-ctx.Done(): // perhaps because a worker has failed
				return ctx.Err()
			}
		})
	})
	for range c.workers {
		group.Go(func() error { return c.work(ctx, jobs, store) })
	}
	err = group.Wait()
	return c.written.Load(), err
}

// walk cuts the stored data of the image into jobs of at most one chunk.
func (c *copier) walk(ctx context.Context, hand func(job) error) error {
	var pending job
	covered := int64(0) // everything below is in a job that was handed out
	send := func() error {
		if pending.length == 0 {
			return nil
		}
		end := pending.off + pending.length
		pending.covered = end - covered
		next := pending
		covered, pending = end, job{}
		return hand(next)
	}
	err := c.img.top.walk(ctx, 0, c.img.Size(), func(off, n int64, kind extentKind) error {
		end := off + n
		if kind == extentHole {
			return ctx.Err()
		}
		for off < end {
			if pending.length > 0 && off/c.chunk != pending.off/c.chunk {
				if err := send(); err != nil {
					return err
				}
			}
			if pending.length == 0 {
				pending.off = off
			}
			stop := min(end, (off/c.chunk+1)*c.chunk)
			pending.length = stop - pending.off // a hole in between is read as zeros
			pending.data += stop - off
			off = stop
		}
		return nil
	})
	if err != nil {
		return err
	}
	return send()
}

// work copies jobs until there are none left.
func (c *copier) work(ctx context.Context, jobs <-chan job,
	store func(p []byte, off int64) (int64, error)) error {
	var buf []byte
	for j := range jobs {
		if err := ctx.Err(); err != nil {
			return err
		}
		if buf == nil {
			buf = make([]byte, c.chunk)
		}
		p := buf[:j.length]
		if n, err := c.img.ReadAt(ctx, p, j.off); n < len(p) {
			return err
		}
		n, err := store(p, j.off)
		c.written.Add(n)
		if err != nil {
			return c.to.explain(err, c.img.Size())
		}
		c.progress.add(j.covered, j.data)
	}
	return nil
}

// SpaceNeeded returns how many bytes the expanded image takes at most. Stored zeros take nothing,
// but only reading finds them. So SpaceNeeded reads the image if the answer would otherwise exceed
// available, and if the image is near and not compressed. A compressed image could claim terabytes
// of zeros and keep the caller busy for hours. So could a far image.
func SpaceNeeded(ctx context.Context, img *Image, available int64, workers int) (int64, error) {
	needed := img.use.total()
	if needed <= available || img.use.compressed > 0 || img.Parallel() > 1 {
		return needed, nil
	}
	return newCopier(img, nil, nil, workers).run(ctx)
}

// CheckSpace returns a *SpaceError if the directory has no room for the expanded image.
func CheckSpace(ctx context.Context, img *Image, dir string, workers int) error {
	available, err := osfile.AvailableSpace(dir)
	if err != nil {
		return err
	}
	needed, err := SpaceNeeded(ctx, img, available, workers)
	if err != nil {
		return err
	}
	if needed > available {
		return &SpaceError{Dir: dir, What: "the expanded disk of " + words.Name(img.Name()),
			Needed: needed, Available: available}
	}
	return nil
}
