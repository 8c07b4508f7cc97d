package rawfile

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

// cacheRegion is the granularity in bytes at which changes through the page cache are remembered.
// The kernel keeps a folio clean or dirty as a whole. With pages of 4 KiB no folio is larger than a
// region or lies in two of them.
const cacheRegion = 2 << 20

// errThroughCache says that a range must be written through the page cache.
var errThroughCache = errors.New("cannot be written past the page cache")

// cacheGuard keeps writes through the page cache of a file and writes past it in different regions,
// as open(2) advises. If a write past the cache has just changed a part of a dirty folio, the
// kernel cannot tell which data is newer, and reports an I/O error at the next flush. The locks of
// some file systems prevent that, but no file system promises it. A nil guard lets no write past
// the cache. Any number of goroutines may use it.
type cacheGuard struct {
	// regions closed to writes past the cache: all of cached, and those where a writer waits to
	// write through the cache
	wanted *Regions
	cached *Regions // may have dirty folios

	mu    sync.Mutex
	ended sync.Cond
	past  []span // guarded by mu; writes past the cache that are under way
}

type span struct{ off, length int64 }

// newCacheGuard makes the guard of a file. Data that is in the file already may still be dirty.
func newCacheGuard(size int64, holes *holeMap) *cacheGuard {
	g := &cacheGuard{wanted: NewRegions(size, cacheRegion), cached: NewRegions(size, cacheRegion)}
	g.ended.L = &g.mu
	old := func(off, length int64) {
		g.wanted.Add(off, length)
		g.cached.Add(off, length)
	}
	if holes == nil {
		old(0, size)
		return g
	}
	holes.written.each(func(off, length int64) { old(off, min(length, size-off)) })
	return g
}

// through is called before a range is changed through the cache. It waits for writes past the cache
// that are under way in its regions, but for none that comes later.
func (g *cacheGuard) through(off, length int64) {
	if g == nil || length <= 0 || g.cached.Covers(off, length) {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	// Otherwise, new writes past the cache could begin again and again while this one waits.
	g.wanted.Add(off, length)
	for g.passingLocked(off, length) {
		g.ended.Wait()
	}
	// Only now: a goroutine that finds the region in cached does not wait.
	g.cached.Add(off, length)
}

// begin reports whether a range may be written past the cache. After true, end must follow.
func (g *cacheGuard) begin(off, length int64) bool {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wanted.touches(off, length) {
		return false
	}
	g.past = append(g.past, span{off, length})
	return true
}

func (g *cacheGuard) end(off, length int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.past, span{off, length}); i >= 0 {
		g.past = slices.Delete(g.past, i, i+1)
	}
	g.ended.Broadcast()
}

// passingLocked reports whether a write past the cache is under way in a region that the range
// touches.
func (g *cacheGuard) passingLocked(off, length int64) bool {
	first, last := off/cacheRegion, (off+length-1)/cacheRegion
	return slices.ContainsFunc(g.past, func(s span) bool {
		return s.off/cacheRegion <= last && first <= (s.off+s.length-1)/cacheRegion
	})
}

// cacheBypass writes to a File past the page cache (O_DIRECT), for data that is not read soon.
type cacheBypass struct {
	disk   *File
	direct *os.File
}

// OpenPastCache returns nil if writing past the cache is not safe. It is not if others may change
// the file, or if the file system may keep old cached pages of the range. Ext4 and XFS drop them.
func (f *File) OpenPastCache() *cacheBypass {
	if os.Getpagesize() != 4<<10 {
		// With pages of 16 or 64 KiB, read-ahead makes folios that are larger than a region.
		return nil
	}
	if f.guard == nil {
		return nil
	}
	if kind := fileSystem(f.File); kind != unix.EXT4_SUPER_MAGIC && kind != unix.XFS_SUPER_MAGIC {
		return nil
	}
	direct, err := OpenDirect(f.File)
	if err != nil {
		return nil
	}
	return &cacheBypass{f, direct}
}

// fileSystem returns the magic number of the file's file system (statfs(2)), or 0 if it is unknown.
func fileSystem(f *os.File) int64 {
	var st unix.Statfs_t
	if osfile.Retry(func() error { return unix.Fstatfs(int(f.Fd()), &st) }) != nil {
		return 0
	}
	return st.Type
}

// OpenDirect opens a file once more, for writes past the page cache.
func OpenDirect(f *os.File) (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()),
		os.O_WRONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
}

// WriteAt is File.WriteAt past the cache. If a region of the range was changed through the cache,
// it returns errThroughCache. If storage needs another alignment, it writes nothing and returns
// EINVAL.
func (c *cacheBypass) WriteAt(p []byte, off int64) (int, error) {
	f, length := c.disk, int64(len(p))
	if err := f.writable(); err != nil {
		return 0, err
	}
	if off < 0 || off > f.Size()-length {
		return 0, OutOfRange("write", off, length, f.Size())
	}
	if length == 0 {
		return 0, nil
	}
	if !f.guard.begin(off, length) {
		return 0, errThroughCache
	}
	defer f.guard.end(off, length)
	f.holes.note(off, length)
	n, err := c.direct.WriteAt(p, off)
	if err != nil && !(n == 0 && errors.Is(err, unix.EINVAL)) {
		return n, f.writeError(off+int64(n), length-int64(n), err)
	}
	return n, err
}

func (c *cacheBypass) Close() error { return c.direct.Close() }
