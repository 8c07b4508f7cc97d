package qcow2

import (
	"context"
	"errors"
	"runtime"
	"sync"
)

const (
	tableCacheBytes   = 16 << 20 // L2 tables kept in memory, per image
	decodedCacheBytes = 8 << 20  // decoded clusters kept in memory, per image
	minSlots          = 4        // of a cache, and of each of its shards
	maxShards         = 16
)

// errNotLoaded is for goroutines that waited for a block whose loading panicked.
var errNotLoaded = errors.New("an internal error kept a cluster from being read")

// cache keeps the most recently used blocks by number: decoded clusters or L2 tables. A block is
// loaded once, and all its readers wait for that. Blocks in different shards share no lock, and no
// lock is held while a block is loaded or read. The memory of a slot is allocated when the slot is
// first used, and then reused for other blocks.
//
// Each reader waits only as long as its own context lasts. If the context of the loading reader
// ends, the next waiting reader loads the block.
type cache struct {
	size   int64 // of a block, bytes
	load   func(ctx context.Context, p []byte, at uint64) error
	shards []shard

	// If there are more readers than slots, a block is loaded aside: it is not kept. Large clusters
	// have few slots. One such block for each processor keeps all processors busy. More would only
	// take memory, and an image could make us use a lot of it.
	places  chan struct{} // full when no more blocks may be loaded aside
	buffers sync.Pool     // of *[]byte, for a block
}

type shard struct {
	mu     sync.Mutex
	loaded sync.Cond
	clock  int64  // guarded by mu
	most   int64  // how many slots the shard has
	slots  []slot // guarded by mu; nil until the first one is used
}

// slot holds a block. Only the loading goroutine writes its data. Afterwards, the data does not
// change while the slot is pinned.
type slot struct {
	key     int64 // guarded by shard.mu; -1: none
	used    int64 // guarded by shard.mu
	pins    int   // guarded by shard.mu; goroutines that load it, wait for it or read it
	loading bool  // guarded by shard.mu
	valid   int64 // guarded by shard.mu; how many bytes from the beginning are loaded
	err     error // guarded by shard.mu; the error of loading
	gaveUp  bool  // guarded by shard.mu; not loaded because the loader's context ended
	data    []byte
}

// pinned is a block that stays until it is released.
type pinned struct {
	data  []byte
	slot  *slot // nil: the block was loaded aside, or there is none
	shard *shard
	cache *cache  // the block was loaded aside for this cache
	aside *[]byte // nil: not loaded aside
}

// init prepares a cache for blocks of size bytes. load fills p with a block, or with its beginning,
// from the place in the file that get was called with.
func (c *cache) init(size, memory int64,
	load func(ctx context.Context, p []byte, at uint64) error,
) {
	slots := max(min(memory/size, 1024), minSlots)
	c.size, c.load = size, load
	c.shards = make([]shard, min(slots/minSlots, maxShards))
	c.places = make(chan struct{}, runtime.GOMAXPROCS(0))
	for i := range c.shards {
		s := &c.shards[i]
		s.loaded.L = &s.mu
		s.most = slots / int64(len(c.shards))
	}
}

// get returns the block at the given place of the file, with at least its first need bytes. The
// caller releases it. If a later caller needs more, the whole block is loaded. Errors are not kept.
func (c *cache) get(ctx context.Context, key int64, at uint64, need int64) (pinned, error) {
	s := &c.shards[uint64(key)%uint64(len(c.shards))]
	s.mu.Lock()
	s.clock++
	b, err := s.waitLocked(ctx, key)
	switch {
	case err != nil:
		s.mu.Unlock()
		return pinned{}, err
	case b == nil:
		b = s.freeLocked()
	case b.valid >= need:
		s.mu.Unlock()
		return pinned{data: b.data, slot: b, shard: s}, nil
	default:
		need = c.size
		if b.pins--; b.pins > 0 { // the block must not change while others read it
			b = nil
		}
	}
	if b == nil { // no free slot, or others still read the shorter block
		s.mu.Unlock()
		return c.loadAside(ctx, at)
	}
	b.key, b.used, b.pins, b.valid = key, s.clock, 1, 0
	b.loading, b.err, b.gaveUp = true, nil, false
	s.mu.Unlock()

	if err := c.fill(ctx, s, b, at, need); err != nil {
		return pinned{}, err
	}
	return pinned{data: b.data, slot: b, shard: s}, nil
}

// waitLocked waits until a block is loaded, and returns its slot, pinned. It returns nil if no slot
// has the block, the loader's error, or ctx's error if ctx ends first.
func (s *shard) waitLocked(ctx context.Context, key int64) (*slot, error) {
	for b := s.findLocked(key); b != nil; b = s.findLocked(key) {
		b.pins++
		b.used = s.clock
		if b.loading && ctx.Done() != nil {
			stop := context.AfterFunc(ctx, func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.loaded.Broadcast()
			})
			defer stop()
		}
		for b.loading && ctx.Err() == nil {
			s.loaded.Wait()
		}
		if !b.loading && b.err == nil {
			return b, nil
		}
		b.pins--
		switch {
		case b.loading:
			return nil, ctx.Err()
		case !b.gaveUp:
			return nil, b.err
		}
	}
	return nil, nil
}

// fill loads a slot. A panic in load ends only a session, so fill then frees the slot and wakes the
// waiting goroutines.
func (c *cache) fill(ctx context.Context, s *shard, b *slot, at uint64, need int64) (err error) {
	err = errNotLoaded
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		b.loading, b.err, b.valid = false, err, need
		if err != nil {
			b.key = -1
			b.pins--
			b.gaveUp = ctx.Err() != nil
		}
		s.loaded.Broadcast()
	}()
	if b.data == nil {
		b.data = make([]byte, c.size)
	}
	err = c.load(ctx, b.data[:need], at)
	return err
}

// loadAside loads a whole block that is not kept. It may wait until another such block is released.
// So a caller must not hold one of the same cache.
func (c *cache) loadAside(ctx context.Context, at uint64) (p pinned, err error) {
	select {
	case c.places <- struct{}{}:
	default:
		select {
		case c.places <- struct{}{}:
		case <-ctx.Done():
			return pinned{}, ctx.Err()
		}
	}
	buf, _ := c.buffers.Get().(*[]byte)
	if buf == nil {
		data := make([]byte, c.size)
		buf = &data
	}
	p = pinned{data: *buf, cache: c, aside: buf}
	err = errNotLoaded
	defer func() { // even if loading panics
		if err != nil {
			p.release()
			p = pinned{}
		}
	}()
	err = c.load(ctx, p.data, at)
	return p, err
}

// peek returns a block if all of it is loaded. The caller releases it. peek does not wait.
func (c *cache) peek(key int64) (p pinned, ok bool) {
	s := &c.shards[uint64(key)%uint64(len(c.shards))]
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.findLocked(key)
	if b == nil || b.loading || b.valid < c.size {
		return pinned{}, false
	}
	b.pins++
	return pinned{data: b.data, slot: b, shard: s}, true
}

// has reports whether the first need bytes of a block are loaded.
func (c *cache) has(key, need int64) bool {
	s := &c.shards[uint64(key)%uint64(len(c.shards))]
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.findLocked(key)
	return b != nil && !b.loading && b.valid >= need
}

func (p pinned) release() {
	if p.aside != nil {
		p.cache.buffers.Put(p.aside)
		<-p.cache.places
	}
	if p.slot == nil {
		return
	}
	p.shard.mu.Lock()
	p.slot.pins--
	p.shard.mu.Unlock()
}

func (s *shard) findLocked(key int64) *slot {
	for i := range s.slots {
		if s.slots[i].key == key {
			return &s.slots[i]
		}
	}
	return nil
}

// freeLocked returns the least recently used slot that is not pinned, or nil.
func (s *shard) freeLocked() *slot {
	if s.slots == nil {
		s.slots = make([]slot, s.most)
		for i := range s.slots {
			s.slots[i].key = -1
		}
	}
	var free *slot
	for i := range s.slots {
		if b := &s.slots[i]; b.pins == 0 && (free == nil || b.used < free.used) {
			free = b
		}
	}
	return free
}
