package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
)

// Blob is one blob of a cache. Any number of goroutines may use it.
type Blob struct {
	cache *Cache
	turns *turns
	opt   BlobOptions
	dir   string // of its segments
	slots []slot

	mu      sync.Mutex
	calls   map[int64]*call // guarded by mu; by chunk
	recent  []recentChunk   // guarded by mu; chunks that could not be written, the newest last
	ahead   []int64         // guarded by mu; chunks to prefetch
	workers int             // guarded by mu; goroutines that prefetch
	removed bool            // guarded by mu
}

var errRemoved = errors.New("the blob was removed from the cache")

// Remove removes all segments of the blob from the directory, and keeps nothing of it from now on.
// Other processes keep their open files for a while.
func (b *Blob) Remove() error {
	b.mu.Lock()
	b.removed, b.ahead, b.recent = true, nil, nil
	b.mu.Unlock()
	for i := range b.slots {
		s := &b.slots[i]
		s.mu.Lock() // wait for a goroutine that is opening it
		s.drop()
		s.mu.Unlock()
	}
	return b.cache.root.RemoveAll(path.Dir(b.dir))
}

// slot is the place of a segment.
type slot struct {
	blob    *Blob
	number  int64
	segment atomic.Pointer[segment] // nil: not open
	mu      sync.Mutex              // held to open it
}

// drop closes the segment when its readers are done.
func (s *slot) drop() {
	if seg := s.segment.Swap(nil); seg != nil {
		seg.retire()
	}
}

// acquire returns the segment if it is open. The caller releases it.
func (s *slot) acquire() *segment {
	if seg := s.segment.Load(); seg != nil && seg.acquire() {
		return seg
	}
	return nil
}

// Size is the blob's, bytes.
func (b *Blob) Size() int64 { return b.opt.Size }

// ReadAt fills p with the bytes from off on, and fetches those that are not in the directory. It
// returns ctx's error if ctx ends first, io.EOF past the end, and otherwise the last error of Fetch
// or Verify.
func (b *Blob) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("blob %s: read at %d", b.opt.Digest, off)
	}
	if off+int64(len(p)) > b.opt.Size {
		p, err = p[:max(0, b.opt.Size-off)], io.EOF
	}
	if int64(len(p)) > b.opt.ChunkSize && !b.Has(off, int64(len(p))) {
		b.Prefetch(off, int64(len(p))) // the chunks of a long read are fetched at once
	}
	for n < len(p) {
		got, readErr := b.readPart(ctx, p[n:], off+int64(n))
		n += got
		if readErr != nil {
			return n, readErr
		}
	}
	return n, err
}

// readPart reads either the part of p that one segment has, or one chunk.
func (b *Blob) readPart(ctx context.Context, p []byte, off int64) (int, error) {
	p = p[:min(int64(len(p)), segmentSize-off%segmentSize)]
	s := &b.slots[off/segmentSize]
	if seg := s.acquire(); seg != nil {
		ready := b.readyIn(seg, off, int64(len(p)))
		if ready > 0 {
			if !seg.used.Load() {
				seg.used.Store(true)
			}
			n, err := seg.file.ReadAt(p[:ready], chunksAt+off%segmentSize)
			seg.release()
			if int64(n) == ready {
				return n, nil
			}
			// The file was cut short, or storage fails. The chunk is fetched again.
			b.cache.warn("a segment of the cache cannot be read",
				fmt.Errorf("%s: %w", s.name(), err))
			s.drop()
			if err := b.cache.root.Remove(s.name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
				b.cache.warn("a segment of the cache cannot be removed", err)
			}
		} else {
			seg.release()
		}
	}
	chunk := off / b.opt.ChunkSize
	content, err := b.chunk(ctx, chunk, false)
	if err != nil {
		return 0, err
	}
	return copy(p, content[off-chunk*b.opt.ChunkSize:]), nil
}

// readyIn is how many of the bytes from off on can be read from the segment's file. All of them are
// in the segment's range.
func (b *Blob) readyIn(seg *segment, off, length int64) int64 {
	if seg.missing.Load() == 0 {
		return length
	}
	end := off + length
	at := off
	for at < end && seg.checked[at%segmentSize/b.opt.ChunkSize].Load() {
		at = (at/b.opt.ChunkSize + 1) * b.opt.ChunkSize
	}
	return min(at, end) - off
}

// Has reports whether the directory has the range, checked. It does not wait. The answer may be out
// of date at once.
func (b *Blob) Has(off, length int64) bool {
	length = min(length, b.opt.Size-off)
	for length > 0 {
		seg := b.slots[off/segmentSize].segment.Load()
		n := min(length, segmentSize-off%segmentSize)
		if seg == nil || b.readyIn(seg, off, n) < n {
			return false
		}
		off += n
		length -= n
	}
	return true
}

// length is how many bytes a chunk has.
func (b *Blob) length(chunk int64) int64 {
	return min(b.opt.ChunkSize, b.opt.Size-chunk*b.opt.ChunkSize)
}

// open returns the segment of a chunk, which the caller releases. After an error there is none.
func (b *Blob) open(chunk int64) (*segment, error) {
	s := &b.slots[chunk*b.opt.ChunkSize/segmentSize]
	if seg := s.acquire(); seg != nil {
		return seg, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if seg := s.acquire(); seg != nil {
		return seg, nil
	}
	b.mu.Lock()
	removed := b.removed
	b.mu.Unlock()
	if removed {
		return nil, errRemoved
	}
	c := b.cache
	if err := c.root.MkdirAll(b.dir); err != nil {
		return nil, err
	}
	seg, err := openSegment(c.root, s.name(),
		segmentHeader{chunkSize: b.opt.ChunkSize, number: s.number, blobSize: b.opt.Size})
	if err != nil {
		return nil, err
	}
	seg.acquire()
	s.segment.Store(seg)
	c.opened(s)
	return seg, nil
}

func (s *slot) name() string {
	return path.Join(s.blob.dir, strconv.FormatInt(s.number, 10))
}

// opened notes an open segment, and closes others if there are too many.
func (c *Cache) opened(s *slot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = append(slices.DeleteFunc(c.open, func(o *slot) bool {
		return o == s || o.segment.Load() == nil
	}), s)
	if len(c.open) > maxOpen {
		c.open[0].drop()
		c.open = c.open[1:]
	}
}

// recentChunk is a chunk that could not be written.
type recentChunk struct {
	number  int64
	content []byte
}

// maxRecent is how many chunks that could not be written are kept in memory.
const maxRecent = 8

// recentlyLocked returns a chunk that could not be written, or nil.
func (b *Blob) recentlyLocked(chunk int64) []byte {
	for _, r := range b.recent {
		if r.number == chunk {
			return r.content
		}
	}
	return nil
}

// keepRecent keeps a chunk in memory that could not be written.
func (b *Blob) keepRecent(chunk int64, content []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.recent) == maxRecent {
		b.recent = b.recent[1:]
	}
	b.recent = append(b.recent, recentChunk{chunk, content})
}
