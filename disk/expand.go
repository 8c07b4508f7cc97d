package disk

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	// holeSize is the granularity at which zeros become holes: the block size of the usual file systems.
	holeSize = 4 << 10
	// chunkSize is what a worker reads at once, unless the image has larger clusters. Bytes.
	chunkSize = 1 << 20
	// writeSize is what is written at once. Kernels that cache files in large folios look for one that is as large: where
	// memory is at hand that makes writes of 1 MiB and more slower, and where it is not, those of 128 KiB. Bytes.
	writeSize = 512 << 10
	// maxCopyBuffers bounds the memory of all workers' buffers. Bytes.
	maxCopyBuffers = 16 << 20
)

// zeros is compared with and written from; nothing writes to it.
var zeros [256 << 10]byte

// copier expands an image into a sparse raw file. One goroutine walks the extents and hands out chunks in order. The
// workers read and decode them side by side, and one goroutine writes them: so the writes are sequential and follow each
// other without a pause, none waits for the kernel's lock of the file (which it does by spinning, at the cost of a core), and
// every cluster is decoded once.
type copier struct {
	img      *Image
	dst      *os.File // nil: only count what would be written
	dir      string   // where dst is, for messages
	progress *Progress
	chunk    int64
	workers  int
	buffers  int // chunks that are read, written or wait to be
}

// job is a part of one chunk for a worker.
type job struct {
	off, length int64
	data        int64 // bytes of it that the image stores
	covered     int64 // bytes that are dealt with when it is done: with the hole before it

	buf   []byte        // of a chunk
	ready chan struct{} // closed when it is read
}

// newCopier prepares an expansion with at most that many workers, 0 for one per processor.
func newCopier(img *Image, dst *os.File, p *Progress, workers int) *copier {
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	if p == nil {
		p = new(Progress)
	}
	c := &copier{img: img, dst: dst, progress: p, chunk: chunkSize}
	if dst != nil {
		c.dir = filepath.Dir(dst.Name())
	}
	// A compressed cluster is decoded as a whole, so a chunk holds whole clusters of every layer.
	img.top.chain(func(l *layer) { c.chunk = max(c.chunk, l.header.clusterSize) })
	c.buffers = max(2, min(workers+2, int(maxCopyBuffers/c.chunk)))
	c.workers = min(workers, c.buffers-1)
	return c
}

// run copies everything. It returns how many bytes were written; the rest of the file is a hole.
func (c *copier) run(ctx context.Context) (written int64, err error) {
	c.progress.start(c.img.Size(), c.img.use.total())
	if c.dst != nil {
		if err := retry(func() error { return c.dst.Truncate(c.img.Size()) }); err != nil {
			return 0, c.writeError(err)
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	jobs, ordered := make(chan *job, c.buffers), make(chan *job, c.buffers)
	free := make(chan []byte, c.buffers)
	for range c.buffers {
		free <- nil // allocated when it is needed
	}
	group.Go(func() error {
		defer close(jobs)
		defer close(ordered)
		return c.walk(ctx, func(j *job) error { return c.hand(ctx, j, free, jobs, ordered) })
	})
	for range c.workers {
		group.Go(func() error { return c.read(ctx, jobs) })
	}
	group.Go(func() (err error) {
		written, err = c.write(ctx, ordered, free)
		return err
	})
	err = group.Wait()
	return written, err
}

// hand gives a job to the workers and the writer, when there is a buffer for it.
func (c *copier) hand(ctx context.Context, j *job, free <-chan []byte, jobs, ordered chan<- *job) error {
	select {
	case j.buf = <-free:
	case <-ctx.Done():
		return ctx.Err()
	}
	if j.buf == nil {
		j.buf = make([]byte, c.chunk)
	}
	j.ready = make(chan struct{})
	// There is room for as many jobs as there are buffers.
	jobs <- j
	ordered <- j
	return nil
}

// walk cuts what the image stores into jobs of at most one chunk.
func (c *copier) walk(ctx context.Context, hand func(*job) error) error {
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
		return hand(&next)
	}
	err := c.img.top.walk(0, c.img.Size(), func(off, n int64, kind extentKind) error {
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

// read fills the buffers of jobs until there are none left.
func (c *copier) read(ctx context.Context, jobs <-chan *job) error {
	for j := range jobs {
		if err := ctx.Err(); err != nil {
			return err
		}
		if n, err := c.img.ReadAt(j.buf[:j.length], j.off); int64(n) < j.length {
			return err
		}
		close(j.ready)
	}
	return nil
}

// write stores the jobs in the order of the disk.
func (c *copier) write(ctx context.Context, ordered <-chan *job, free chan<- []byte) (written int64, err error) {
	for j := range ordered {
		select {
		case <-j.ready:
		case <-ctx.Done(): // perhaps because a worker has failed
			return written, ctx.Err()
		}
		n, err := c.store(j.buf[:j.length], j.off)
		written += n
		if err != nil {
			return written, err
		}
		free <- j.buf
		c.progress.add(j.covered, j.data)
	}
	return written, nil
}

// store writes what is not zero of p, by blocks of the destination's file system.
func (c *copier) store(p []byte, off int64) (written int64, err error) {
	for len(p) > 0 {
		zero, n := leadingRun(p, off)
		if !zero {
			if c.dst != nil {
				if _, err := c.dst.WriteAt(p[:n], off); err != nil {
					return written, c.writeError(err)
				}
			}
			written += int64(n)
		}
		p, off = p[n:], off+int64(n)
	}
	return written, nil
}

// leadingRun is how much of p, which is at off in the file, consists of zero blocks only, or of other blocks only; of
// those at most what is best written at once.
func leadingRun(p []byte, off int64) (zero bool, n int) {
	for n < len(p) {
		block := min(len(p)-n, holeSize-int((off+int64(n))%holeSize))
		isZero := allZero(p[n : n+block])
		if n > 0 && (isZero != zero || !zero && n+block > writeSize) {
			break
		}
		zero = isZero
		n += block
	}
	return zero, n
}

// allZero reports whether p, at most holeSize bytes, is all zeros. Most blocks show in their first word that they are
// not.
func allZero(p []byte) bool {
	if len(p) >= 8 && binary.NativeEndian.Uint64(p) != 0 {
		return false
	}
	return bytes.Equal(p, zeros[:len(p)])
}

// writeError explains an error of writing the expanded disk.
func (c *copier) writeError(err error) error {
	if isNoSpace(err) {
		available, statErr := availableSpace(c.dir)
		if statErr != nil {
			available = 0
		}
		return &SpaceError{Dir: c.dir, What: "the expanded disk of " + c.img.Name(), Available: available}
	}
	return fmt.Errorf("expanding %s: %w", c.img.Name(), err)
}

// checkSpace returns a *SpaceError where the directory has no room for the expanded image. Stored zeros need no room,
// but telling them apart takes reading everything; that is done only where it decides, and only for what is stored as
// it is: a compressed image could claim to hold terabytes of zeros, and keep us busy for hours.
func checkSpace(ctx context.Context, img *Image, dir string, workers int) error {
	available, err := availableSpace(dir)
	if err != nil {
		return err
	}
	needed := img.use.total()
	if needed > available && img.use.compressed == 0 {
		if needed, err = newCopier(img, nil, nil, workers).run(ctx); err != nil {
			return err
		}
	}
	if needed > available {
		return &SpaceError{Dir: dir, What: "the expanded disk of " + img.Name(), Needed: needed, Available: available}
	}
	return nil
}

// availableSpace is what an unprivileged user can still write into the directory's file system. Bytes.
func availableSpace(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(dir, &st) }); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	unit := st.Frsize
	if unit <= 0 {
		unit = st.Bsize
	}
	if unit <= 0 || st.Bavail > uint64(1<<63-1)/uint64(unit) {
		return 1<<63 - 1, nil
	}
	return int64(st.Bavail) * unit, nil
}

// isNoSpace reports whether an error says that the file system, a quota or a limit on files is exhausted.
func isNoSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG)
}
