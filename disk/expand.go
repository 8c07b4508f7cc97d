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
	// writeSize is what is written at once. Kernels that cache files in large folios look for one that is as large, and
	// writes of 1 MiB took up to five times the CPU time that these take. Bytes.
	writeSize = 128 << 10
	// maxCopyBuffers bounds the memory of all workers' buffers. Bytes.
	maxCopyBuffers = 16 << 20
)

// zeros is compared with and written from; nothing writes to it.
var zeros [256 << 10]byte

// copier expands an image into a sparse raw file. One goroutine walks the extents and hands out chunks in order. The
// workers read and decode them side by side, and write them in turn: so the writes are sequential, none waits for the
// kernel's lock of the file (which it does by spinning, at the cost of a core), and every cluster is decoded once.
type copier struct {
	img      *Image
	dst      *os.File // nil: only count what would be written
	dir      string   // where dst is, for messages
	progress *Progress
	chunk    int64
	workers  int
}

// job is a part of one chunk for a worker.
type job struct {
	off, length int64
	data        int64 // bytes of it that the image stores
	covered     int64 // bytes that are dealt with when it is done: with the hole before it

	turn <-chan struct{} // closed when everything before it is written
	done chan struct{}   // to be closed when it is written itself
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
	// One more than can decode at a time, for one of them writes or waits for its turn.
	c.workers = max(1, min(workers+1, int(maxCopyBuffers/c.chunk)))
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
	jobs := make(chan job, c.workers)
	group.Go(func() error {
		defer close(jobs)
		return c.walk(ctx, jobs)
	})
	counts := make([]int64, c.workers)
	for i := range c.workers {
		group.Go(func() (err error) {
			counts[i], err = c.work(ctx, jobs)
			return err
		})
	}
	err = group.Wait()
	for _, n := range counts {
		written += n
	}
	return written, err
}

// walk cuts what the image stores into jobs of at most one chunk.
func (c *copier) walk(ctx context.Context, jobs chan<- job) error {
	var pending job
	covered := int64(0) // everything below is in a job that was sent
	turn := make(chan struct{})
	close(turn)
	send := func() error {
		if pending.length == 0 {
			return nil
		}
		end := pending.off + pending.length
		pending.covered = end - covered
		pending.turn, pending.done = turn, make(chan struct{})
		turn = pending.done
		select {
		case jobs <- pending:
		case <-ctx.Done():
			return ctx.Err()
		}
		covered, pending = end, job{}
		return nil
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

// work copies chunks until there are none left.
func (c *copier) work(ctx context.Context, jobs <-chan job) (written int64, err error) {
	buf := make([]byte, c.chunk)
	for j := range jobs {
		if err := ctx.Err(); err != nil {
			return written, err
		}
		p := buf[:j.length]
		if n, err := c.img.ReadAt(p, j.off); n < len(p) {
			return written, err
		}
		select {
		case <-j.turn:
		case <-ctx.Done(): // perhaps because what comes before it has failed
			return written, ctx.Err()
		}
		n, err := c.store(p, j.off)
		written += n
		if err != nil {
			return written, err
		}
		close(j.done)
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
