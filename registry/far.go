package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/bitset"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

type descriptor = v1.Descriptor

// farFile is a file in a layer that is not compressed. An index has the digests of its chunks.
// Reads fetch chunks, verify them and keep them in a cache.
type farFile struct {
	farOptions
	blob   chunks
	name   string        // of the content, as a digest
	chunk  int64         // bytes in a fetch
	cached *cache.Blob   // fetches chunks in a recorded order; nil: the layer has no index
	tables *layer.Tables // the metadata of the file; nil: it must be fetched
	// booted are the chunks that a recorded boot fetches ahead; nil: no boot was recorded
	booted atomic.Pointer[bitset.Set]
	// opening says that the image is being opened. The announced reads are in the tables, so
	// nothing need be fetched for them.
	opening atomic.Bool
	came    atomic.Int64 // bytes fetched from the registry

	mu   sync.Mutex
	runs [readRuns]readRun // guarded by mu; the last used first
}

// farOptions say how to read a file.
type farOptions struct {
	report  reportRetry
	verdict *verdict // on the image; nil: there is nothing to compare
	// timeout is how long a chunk may have the wrong digest, although it is fetched again and
	// again; 0: wrongTimeout
	timeout time.Duration
	// ends says that a read fails if a chunk cannot be fetched now. Otherwise it waits.
	ends bool
	// near fills p with the chunk at off without the registry, if it can, for example from a copy
	// on this machine. The content may be wrong. nil: all chunks are fetched.
	near func(ctx context.Context, p []byte, off int64) bool
}

// chunks are the bytes of a file. Each read may take long. The content that it reads is kept.
type chunks interface {
	// ReadAt fills p, whose bytes lie in the file.
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
	Prefetch(off, length int64)
	Size() int64
	// Has reports whether a read of the range would fetch nothing. It does not wait.
	Has(off, length int64) bool
	// run reports whether the bytes at off are known to be zeros, and how many of length bytes are
	// the same. Zeros are never read.
	run(off, length int64) (n int64, zero bool)
}

// indexed are the chunks of a file of an index.
type indexed struct {
	*cache.Blob
	*layer.Chunks
}

func (x indexed) run(off, length int64) (int64, bool) { return x.Run(off, length) }

// section is a file in the middle of a layer or of other bytes.
type section struct {
	of        chunks
	off, size int64
}

func (s section) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return s.of.ReadAt(ctx, p, s.off+off)
}

func (s section) Prefetch(off, length int64) { s.of.Prefetch(s.off+off, min(length, s.size-off)) }

func (s section) Size() int64 { return s.size }

func (s section) Has(off, length int64) bool {
	return s.of.Has(s.off+off, min(length, s.size-off))
}

func (s section) run(off, length int64) (n int64, zero bool) {
	return s.of.run(s.off+off, min(length, s.size-off))
}

// readRun is a place in a file where chunks are read one after the other.
type readRun struct {
	next   int64 // the next chunk
	begin  int64 // where the first read began; bytes
	end    int64 // where the last read ended; bytes
	window int64 // four times the number of chunks to fetch ahead; 0: none yet
}

const (
	// readRuns is for how many such places of a file are remembered.
	readRuns = 8
	// farthestAhead is how much is fetched ahead, in bytes: as much as 16 reads of 256 KiB.
	farthestAhead = 4 << 20
)

// readAhead fetches the next chunks of a file that is read in order. A guest asks for little of a
// file at a time, and each fetch takes long.
func (f *farFile) readAhead(off, length int64) {
	if f.blob.Has(off, length+farthestAhead) {
		return // nothing will be fetched soon, so do not wait for the lock
	}
	first, last := off/f.chunk, (off+length-1)/f.chunk
	if f.inBoot(first) && f.inBoot(last) {
		return // the guest's reads were recorded, so do not guess
	}
	f.mu.Lock()
	i := slices.IndexFunc(f.runs[:], func(r readRun) bool {
		return r.window > 0 && (first == r.next || first == r.next-1)
	})
	run := readRun{window: 1, begin: off}
	goesOn, short := false, false
	if i < 0 {
		i = readRuns - 1
	} else {
		run = f.runs[i]
		// If a read is in the next chunk, but not where the last read ended, the reads may be
		// random. Most files are short: do not fetch ahead after the first read.
		near := f.chunk / 32
		gap := off - run.end
		if goesOn = run.window > 1 || -near <= gap && gap <= near; !goesOn {
			run.begin = off
		}
		short = run.window == 1 && off+length-run.begin < f.chunk/4
	}
	run.end = off + length
	ahead := goesOn && !short && last >= run.next
	if ahead {
		run.window = min(2*run.window, 4*farthestAhead/f.chunk)
	}
	if !goesOn || !short {
		run.next = max(run.next, last+1)
	}
	copy(f.runs[1:i+1], f.runs[:i])
	f.runs[0] = run
	f.mu.Unlock()
	if ahead {
		f.WillRead(run.next*f.chunk, (run.window+2)/4*f.chunk) // most files end soon
	}
}

var _ image.Source = (*farFile)(nil)

// newFarFile opens a file of a layer.
func newFarFile(c *cache.Cache, from *transport.Blob, x *layer.Index, f *layer.IndexFile,
	opt farOptions) (*farFile, error) {
	chunks, err := x.ChunksOf(f)
	if err != nil {
		return nil, err
	}
	size := max(x.ChunkSize, cache.MinChunkSize)
	far := &farFile{farOptions: opt, chunk: size, name: chunks.Name, tables: x.TablesOf(f)}
	// An error of arrived only has the effect that the chunk is fetched again.
	arrived := func(chunk int64, p []byte) error {
		err := chunks.Check(p, chunk*size)
		if err == nil {
			_ = far.verdict.condemn(sameTables(f.Name, far.tables, p, chunk*size))
		}
		return err
	}
	far.cached, err = c.Blob(cache.BlobOptions{
		Digest: far.name, From: from.Host(), Size: f.Size, ChunkSize: size, Verify: arrived,
		Fetch: func(ctx context.Context, p []byte, off int64) error {
			check := func() error { return chunks.Check(p, off) }
			if far.near != nil && far.near(ctx, p, off) && check() == nil {
				return nil
			}
			far.came.Add(int64(len(p)))
			return from.FillChecked(ctx, p, f.Offset+off, check)
		},
	})
	far.blob = indexed{far.cached, chunks}
	return far, err
}

// ReadAt waits until ctx ends for data that cannot be fetched now. Registries come back, and wrong
// data may be right when it is fetched again.
//
// It fetches neither chunks of zeros nor the metadata in the index.
func (f *farFile) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if err := f.verdict.err(); err != nil {
		return 0, err
	}
	if off >= 0 && f.tables.Read(p, off) {
		return len(p), nil
	}
	n, err = f.stored(ctx, p, off)
	if bad := f.verdict.err(); bad != nil {
		return 0, bad
	}
	return n, err
}

// stored is ReadAt without the metadata in the index.
func (f *farFile) stored(ctx context.Context, p []byte, off int64) (n int, err error) {
	var end error
	if off < 0 || off >= f.Size() {
		return 0, io.EOF
	} else if rest := f.Size() - off; int64(len(p)) > rest {
		p, end = p[:rest], io.EOF
	}
	for n < len(p) {
		at := off + int64(n)
		length, zero := f.blob.run(at, int64(len(p)-n))
		part := int(length)
		if zero {
			clear(p[n : n+part])
		} else if part, err = f.fetched(ctx, p[n:n+part], at); err != nil {
			return n + part, err
		}
		n += part
	}
	return n, end
}

// fetched reads data that is no hole.
func (f *farFile) fetched(ctx context.Context, p []byte, off int64) (int, error) {
	if !f.ends { // a reader that does not wait may read several chunks at a time
		f.readAhead(off, int64(len(p)))
	}
	var wrongSince time.Time // zero: the content was right in the last attempt
	for pause := transport.FirstPause; ; pause = min(2*pause, transport.LongPause) {
		n, err := f.blob.ReadAt(ctx, p, off)
		switch {
		case err == nil:
			return n, nil
		case errors.Is(err, disk.ErrWrongContent):
			return n, err
		case errors.As(err, new(*transport.ReplacedError)): // waiting would not help
			return n, fmt.Errorf("%w: %w", disk.ErrWrongContent, err)
		case f.ends:
			return n, err
		case ctx.Err() != nil:
			return n, fmt.Errorf("%w: %w", disk.ErrNotNow, err)
		}
		timeout := cmp.Or(f.timeout, wrongTimeout)
		if wrong := new(transport.DigestError); !errors.As(err, &wrong) {
			wrongSince = time.Time{}
		} else if wrongSince.IsZero() {
			wrongSince = time.Now()
		} else if time.Since(wrongSince) > timeout {
			return n, fmt.Errorf("%w; that is so for %s: if the registry is right, the image "+
				"contradicts itself: push the image again", err, timeout)
		}
		wait := max(pause, min(transport.WaitFor(err), maxRetryAfter))
		f.report(err, "a read waits", wait)
		if transport.PauseFor(ctx, wait) != nil {
			return n, fmt.Errorf("%w: %w", disk.ErrNotNow, err)
		}
	}
}

// maxRetryAfter is the longest pause that a registry may ask for.
const maxRetryAfter = time.Minute

func (f *farFile) Size() int64 { return f.blob.Size() }

func (f *farFile) Identity() image.Identity { return image.Identity{Digest: f.name} }

func (f *farFile) Parallel() int { return transport.Reads }

// Extent describes ranges that are known to be zeros as holes. Everything else is data.
func (f *farFile) Extent(off, length int64) (disk.Extent, error) {
	if off < 0 || off >= f.Size() {
		return disk.Extent{}, fmt.Errorf("an extent at %d of %d bytes", off, f.Size())
	}
	n, zero := f.blob.run(off, min(length, f.Size()-off))
	return disk.Extent{Length: n, Data: !zero}, nil
}

func (f *farFile) WillRead(off, length int64) {
	if f.opening.Load() {
		return
	}
	end := min(off+length, f.Size())
	for off >= 0 && off < end {
		n, zero := f.blob.run(off, end-off)
		if !zero {
			f.blob.Prefetch(off, n)
		}
		off += n
	}
}

// inBoot reports whether a recorded boot reads the chunk.
func (f *farFile) inBoot(chunk int64) bool {
	booted := f.booted.Load()
	return booted != nil && booted.Has(chunk)
}

// order begins to fetch runs of chunks, one after the other. A chunk of the index has size bytes.
// The channel is closed when all were fetched, as far as possible.
func (f *farFile) order(runs [][2]int64, size int64) <-chan struct{} {
	var mine [][2]int64
	for _, r := range runs {
		off, end := r[0]*size, min((r[0]+r[1])*size, f.Size())
		for off < end {
			n, zero := f.blob.run(off, end-off)
			if first := off / f.chunk; !zero {
				mine = append(mine, [2]int64{first, (off+n-1)/f.chunk - first + 1})
			}
			off += n
		}
	}
	var booted bitset.Set
	for _, r := range mine {
		for chunk := r[0]; chunk < r[0]+r[1]; chunk++ {
			booted.Add(chunk)
		}
	}
	f.booted.Store(&booted)
	return f.cached.Order(mine)
}

// sameTables compares bytes of a file with the copy in its index.
func sameTables(name string, tables *layer.Tables, p []byte, off int64) error {
	if at := tables.Differ(p, off); at >= 0 {
		return disagrees("it has other content than the layer for %q at %d", name, at)
	}
	return nil
}

// compareTables compares all copies that an index has of parts of a file with the file. content
// reads the file, and need not return more than it must.
func compareTables(ctx context.Context, name string, tables *layer.Tables,
	content func(ctx context.Context, p []byte, off int64) (int, error)) error {
	if tables == nil {
		return nil
	}
	buf := make([]byte, layer.IndexChunk)
	for _, r := range tables.Ranges {
		for off, end := r[0], r[0]+r[1]; off < end; {
			p := buf[:min(int64(len(buf)), end-off)]
			if n, err := content(ctx, p, off); n < len(p) {
				return transport.UnexpectedEnd(err)
			}
			if err := sameTables(name, tables, p, off); err != nil {
				return err
			}
			off += int64(len(p))
		}
	}
	return nil
}

// Check returns nil: content with a digest never changes.
func (f *farFile) Check() error { return nil }

// Close leaves the chunks in the cache.
func (f *farFile) Close() error { return nil }
