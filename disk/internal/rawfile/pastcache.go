package rawfile

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/osfile"
)

// cacheRegion is how finely it is remembered what was changed through the page cache of a file: no
// folio, which the kernel keeps clean or dirty as a whole, is larger, nor reaches into two of them,
// where a page has 4 KiB. Bytes.
const cacheRegion = 2 << 20

// errThroughCache says that something has to be written through the page cache.
var errThroughCache = errors.New("cannot be written past the page cache")

// cacheGuard keeps what goes through the page cache of a file and what goes past it in different
// regions, as open(2) advises: a kernel that finds a folio dirty of which some was just written
// past the cache cannot tell what is newer, and reports an I/O error at the next flush. File
// systems whose locks exclude that do not promise it. A nil guard lets nothing pass the cache. Any
// number of goroutines.
type cacheGuard struct {
	// nothing more goes past the cache there: all of cached, and where somebody waits to write
	// through it
	wanted *Regions
	cached *Regions // may have dirty folios

	mu    sync.Mutex
	ended sync.Cond
	past  []span // guarded by mu; what is on its way past the cache
}

type span struct{ off, length int64 }

// newCacheGuard guards a file. What it holds already may still be dirty.
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

// through is called before a range is changed through the cache. It waits for what is on its way
// past it, and for nothing that comes later.
func (g *cacheGuard) through(off, length int64) {
	if g == nil || length <= 0 || g.cached.Covers(off, length) {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	// or one run of a chunk after the other could pass, while the guest waits for all of them
	g.wanted.Add(off, length)
	for g.passingLocked(off, length) {
		g.ended.Wait()
	}
	// Not earlier: who sees the region here does not wait.
	g.cached.Add(off, length)
}

// begin reports whether a range may be written past the cache, which end is then called for.
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
	for i, s := range g.past {
		if s == (span{off, length}) {
			g.past = append(g.past[:i], g.past[i+1:]...)
			break
		}
	}
	g.ended.Broadcast()
}

// passingLocked reports whether something is on its way into a region that the range touches.
func (g *cacheGuard) passingLocked(off, length int64) bool {
	first, last := off/cacheRegion, (off+length-1)/cacheRegion
	for _, s := range g.past {
		if s.off/cacheRegion <= last && first <= (s.off+s.length-1)/cacheRegion {
			return true
		}
	}
	return false
}

// cacheBypass is the way into a File past the page cache (O_DIRECT), for what nobody needs there
// soon.
type cacheBypass struct {
	disk   *File
	direct *os.File
}

// OpenPastCache returns nil where the file has no such way: where it is not known what others do
// with it, or that the file system drops what the cache holds of a range that is written past it,
// as ext4 and XFS do.
func (f *File) OpenPastCache() *cacheBypass {
	if os.Getpagesize() != 4<<10 {
		// with pages of 16 or 64 KiB, reading ahead makes folios that are larger than a region
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

// fileSystem is the magic number of the file system that a file is on, as of statfs(2); 0 where it
// is not known.
func fileSystem(f *os.File) int64 {
	var st unix.Statfs_t
	if osfile.Retry(func() error { return unix.Fstatfs(int(f.Fd()), &st) }) != nil {
		return 0
	}
	return st.Type
}

// OpenDirect opens a file again, for writing past the page cache.
func OpenDirect(f *os.File) (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()),
		os.O_WRONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
}

// WriteAt is File.WriteAt past the cache. It returns errThroughCache where the file was changed
// through the cache nearby, and EINVAL, having written nothing, where the storage wants another
// alignment.
func (c *cacheBypass) WriteAt(p []byte, off int64) (int, error) {
	f, length := c.disk, int64(len(p))
	if err := f.writable(); err != nil {
		return 0, err
	}
	if off < 0 || off > f.size-length {
		return 0, OutOfRange("write", off, length, f.size)
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
