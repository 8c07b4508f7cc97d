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

// errNotLoaded is for those who waited for a block, the loading of which panicked.
var errNotLoaded = errors.New("an internal error kept a cluster from being read")

// cache keeps the blocks that were used last: clusters of decoded data or L2 tables, by their
// number. What is being loaded is loaded once, and whoever wants it waits. Blocks of different
// shards share no lock, and none is held while one is loaded or read. Memory is allocated when a
// slot is used for the first time, and used again for other blocks.
//
// Each reader waits only as long as its own context lasts. When that of the one who loads a block
// ends, the next reader who waits for the block loads it.
type cache struct {
	size   int64 // of a block, bytes
	load   func(ctx context.Context, p []byte, at uint64) error
	shards []shard

	// What is loaded aside is not kept: more readers than slots, as large clusters have few. One
	// for each processor keeps them all busy, and more would only take memory, of which an image
	// could ask for a lot.
	places  chan struct{} // full: no more
	buffers sync.Pool     // of *[]byte, for a block
}

type shard struct {
	mu     sync.Mutex
	loaded sync.Cond
	clock  int64  // guarded by mu
	slots  []slot // guarded by mu
}

// slot holds a block. Its data is written by whoever loads it, and not changed while it is pinned
// after that.
type slot struct {
	key     int64 // guarded by shard.mu; -1: none
	used    int64 // guarded by shard.mu
	pins    int   // guarded by shard.mu; who loads, waits for or reads it
	loading bool  // guarded by shard.mu
	valid   int64 // guarded by shard.mu; bytes of data, from the beginning, that are loaded
	err     error // guarded by shard.mu; of loading
	gaveUp  bool  // guarded by shard.mu; it was not loaded because the loader's context ended
	data    []byte
}

// pinned is a block that cannot go away until it is released.
type pinned struct {
	data  []byte
	slot  *slot // nil: it was loaded aside, or there is none
	shard *shard
	cache *cache  // that it was loaded aside for
	aside *[]byte // nil: it was not
}

// init prepares a cache for blocks of size bytes. load fills p with a block, or its beginning, from
// the place in the file that get is told.
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
		s.slots = make([]slot, slots/int64(len(c.shards)))
		for j := range s.slots {
			s.slots[j].key = -1
		}
	}
}

// get returns a block, which is at the given place of the file, and has to be released. Its first
// need bytes are there; a block of which more is wanted later is then loaded whole. A failure is
// not kept.
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
		if b.pins--; b.pins > 0 { // it is not changed while it is read
			b = nil
		}
	}
	if b == nil { // more readers than slots, or of more than others want of it
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

// waitLocked returns the slot of a block, with a pin, when what is loaded of it is there; nil if it
// is in none. It returns the error of whoever was loading the block, or ctx's when that ends
// before.
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

// fill loads a slot. Also where that panics, which ends no more than a session, whoever waits for
// the block goes on, and the slot is free.
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

// loadAside loads a whole block that is not kept. It may have to wait for others to release theirs,
// so nobody asks for one who holds one of the same cache.
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
	defer func() { // also where loading panics
		if err != nil {
			p.release()
			p = pinned{}
		}
	}()
	err = c.load(ctx, p.data, at)
	return p, err
}

// peek returns a block, which has to be released, if the whole of it is there. It waits for
// nothing.
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

// has reports whether the first need bytes of a block can be had without loading it.
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

// freeLocked is the slot that nobody reads and that was not used for longest.
func (s *shard) freeLocked() *slot {
	var free *slot
	for i := range s.slots {
		if b := &s.slots[i]; b.pins == 0 && (free == nil || b.used < free.used) {
			free = b
		}
	}
	return free
}
