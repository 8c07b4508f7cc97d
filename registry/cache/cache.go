package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/osfile"
)

const (
	// MinChunkSize and MaxChunkSize limit the size of a fetch, in bytes.
	MinChunkSize = 64 << 10
	MaxChunkSize = 4 << 20
	// MinSize is the smallest limit of a cache: a few segments of a few blobs. Bytes.
	MinSize = 256 << 20

	// version is the directory of the format that this program uses.
	version = "v1"
	// fetches is how many chunks are fetched at once from one place. prefetches is how many of them
	// may be chunks that no reader waits for.
	fetches    = 16
	prefetches = 12
	// maxOpen is how many segment files are kept open.
	maxOpen = 1024
)

// Options say how a cache behaves.
type Options struct {
	// Size is the limit of the directory, for all processes together, in bytes. Chunks that are
	// being fetched may exceed it for a moment. 0: no limit.
	Size int64
	Log  *zap.Logger // nil: none
	// Others returns other things in the directory that count towards Size and may be removed. nil:
	// there are none. A quarter of Size is always left for chunks.
	Others func() ([]Other, error)
}

// Other is something in the directory that does not belong to the cache.
type Other struct {
	Name  string // for people
	Bytes int64  // that it takes
	Used  time.Time
	// Remove removes it. If it is in use, the error is ErrInUse.
	Remove func() error
}

// ErrInUse says that a thing is in use, and stays.
var ErrInUse = errors.New("it is in use")

// Stats are the numbers of a cache since it was opened.
type Stats struct {
	Fetched      int64 // chunks that were fetched
	FetchedBytes int64
	Wrong        int64 // fetches of content that did not match its digest
	Damaged      int64 // chunks of the directory whose content had changed
	Unsaved      int64 // chunks that could not be written to the directory
}

// Cache is a directory of chunks. Its methods, except Close, may be called by any number of
// goroutines.
type Cache struct {
	root *osfile.Shared
	opt  Options
	log  *zap.Logger
	life context.Context // ends with Close
	end  context.CancelFunc
	work sync.WaitGroup

	turns   sync.Map      // by BlobOptions.From: *turns
	crowded chan struct{} // wakes the sweeper
	written atomic.Int64  // bytes since the sweeper was last woken

	fetched, fetchedBytes, wrong, damaged, unsaved atomic.Int64
	lastWarning                                    atomic.Int64 // nanoseconds since 1970

	mu   sync.Mutex
	open []*slot // guarded by mu; slots with an open segment, opened longest ago first
}

// Open opens the cache in a directory, and makes the directory if it is missing. Several processes
// may use it at once. The mode of the directory decides who may use it: if its group may write to
// it, all members of the group can use everything in it.
func Open(dir string, opt Options) (*Cache, error) {
	if opt.Size != 0 && opt.Size < MinSize {
		return nil, fmt.Errorf("the cache's size is %d bytes: want at least %d", opt.Size, MinSize)
	}
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	root, err := osfile.OpenShared(dir, 0o770)
	if err != nil {
		return nil, fmt.Errorf("the cache directory cannot be opened: %w", err)
	}
	if err := root.Mkdir(version); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, errors.Join(fmt.Errorf("the cache cannot be written: %w", err), root.Close())
	}
	c := &Cache{root: root, opt: opt, log: opt.Log, crowded: make(chan struct{}, 1)}
	c.life, c.end = context.WithCancel(context.Background())
	c.work.Go(c.sweep)
	return c, nil
}

// Close stops the background work and closes every file. No other call may be under way.
func (c *Cache) Close() error {
	c.end()
	c.work.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.open {
		s.drop()
	}
	c.open = nil
	return c.root.Close()
}

// Stats returns the numbers of the cache so far.
func (c *Cache) Stats() Stats {
	return Stats{Fetched: c.fetched.Load(), FetchedBytes: c.fetchedBytes.Load(),
		Wrong: c.wrong.Load(), Damaged: c.damaged.Load(), Unsaved: c.unsaved.Load()}
}

// BlobOptions describe a blob and its origin.
type BlobOptions struct {
	Digest    string // names the blob, as sha256:0123...
	From      string // source of Fetch, such as a registry; a silent one delays no other
	Size      int64  // bytes
	ChunkSize int64  // bytes, a power of 2 from MinChunkSize to MaxChunkSize
	// Fetch fills p with one whole chunk: the bytes of the blob from off on. It may take long. It
	// tries again by itself while that is worthwhile, until ctx ends. Any number of goroutines may
	// call it.
	Fetch func(ctx context.Context, p []byte, off int64) error
	// Verify returns an error if p is not the content of the chunk with that number. A
	// *fs.PathError says that this cannot be checked now. nil: there is no way to check. Any number
	// of goroutines may call it.
	Verify func(chunk int64, p []byte) error
}

// digestForm is compiled when it is first needed, because a start takes milliseconds, and most
// daemons serve nothing from a registry.
var digestForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[a-z0-9]{2,16}:[0-9a-f]{32,128}$`)
})

// Blob opens a blob. It is closed with the cache.
func (c *Cache) Blob(opt BlobOptions) (*Blob, error) {
	switch {
	case !digestForm().MatchString(opt.Digest):
		return nil, fmt.Errorf("%q is not a digest: want sha256: and 64 hexadecimal digits",
			opt.Digest)
	case opt.Size < 0:
		return nil, fmt.Errorf("blob %s: the size is %d bytes", opt.Digest, opt.Size)
	case opt.ChunkSize < MinChunkSize || opt.ChunkSize > MaxChunkSize ||
		opt.ChunkSize&(opt.ChunkSize-1) != 0:
		return nil, fmt.Errorf("blob %s: the chunk size is %d bytes: want a power of 2 from %d "+
			"to %d", opt.Digest, opt.ChunkSize, MinChunkSize, MaxChunkSize)
	}
	dir := path.Join(version, strings.ReplaceAll(opt.Digest, ":", "-"),
		strconv.FormatInt(opt.ChunkSize, 10))
	own, _ := c.turns.LoadOrStore(opt.From, newTurns())
	b := &Blob{cache: c, turns: own.(*turns), opt: opt, dir: dir, calls: make(map[int64]*call),
		slots: make([]slot, (opt.Size+segmentSize-1)/segmentSize)}
	for i := range b.slots {
		b.slots[i].blob, b.slots[i].number = b, int64(i)
	}
	return b, nil
}

// warnEvery is the least time between two warnings about a directory that cannot be written.
const warnEvery = time.Minute

// warn logs a problem with the directory, but not every time.
func (c *Cache) warn(message string, err error) {
	now, last := time.Now().UnixNano(), c.lastWarning.Load()
	if last != 0 && now-last < int64(warnEvery) || !c.lastWarning.CompareAndSwap(last, now) {
		return
	}
	c.log.Warn(message, zap.Error(err))
}
