package qcow2

import (
	"fmt"
	"sync"
)

const (
	tableCacheBytes   = 16 << 20 // L2 tables kept in memory, per image
	decodedCacheBytes = 8 << 20  // decoded clusters kept in memory, per image
	minCached         = 4
)

// lru keeps a bounded number of immutable byte slices by key; the one that was not used for longest goes first.
// What is being loaded is loaded once, and whoever wants it waits.
type lru struct {
	mu    sync.Mutex
	slots int
	clock int64              // guarded by mu
	items map[int64]*lruItem // guarded by mu
}

type lruItem struct {
	ready chan struct{} // closed when data or err is set
	data  []byte
	err   error
	used  int64 // guarded by lru.mu
}

func (c *lru) init(slots int) {
	c.slots = max(slots, minCached)
	c.items = make(map[int64]*lruItem)
}

// get returns the item, or calls load for it. Failures are not kept.
func (c *lru) get(key int64, load func() ([]byte, error)) ([]byte, error) {
	c.mu.Lock()
	c.clock++
	if it := c.items[key]; it != nil {
		it.used = c.clock
		c.mu.Unlock()
		<-it.ready
		return it.data, it.err
	}
	it := &lruItem{ready: make(chan struct{}), used: c.clock}
	if len(c.items) >= c.slots {
		c.evictLocked()
	}
	c.items[key] = it
	c.mu.Unlock()

	it.data, it.err = load()
	close(it.ready)
	if it.err != nil {
		c.mu.Lock()
		if c.items[key] == it {
			delete(c.items, key)
		}
		c.mu.Unlock()
	}
	return it.data, it.err
}

// hit returns the item if it is there and loaded, without allocating.
func (c *lru) hit(key int64) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	it := c.items[key]
	if it == nil {
		return nil
	}
	select {
	case <-it.ready:
	default:
		return nil
	}
	c.clock++
	it.used = c.clock
	return it.data
}

func (c *lru) evictLocked() {
	var oldest int64
	var victim *lruItem
	for key, it := range c.items {
		if victim == nil || it.used < victim.used {
			oldest, victim = key, it
		}
	}
	delete(c.items, oldest)
}

// tableCache keeps L2 tables by their index in the L1 table.
type tableCache struct{ lru }

func (c *tableCache) init(clusterSize int64) { c.lru.init(int(min(tableCacheBytes/clusterSize, 1024))) }

func (c *tableCache) get(im *Image, index, off int64) ([]byte, error) {
	if t := c.hit(index); t != nil {
		return t, nil
	}
	return c.lru.get(index, func() ([]byte, error) {
		t := make([]byte, im.hdr.clusterSize())
		if _, err := im.r.ReadAt(t, off); err != nil {
			return nil, fmt.Errorf("reading L2 table %d: %w", index, err)
		}
		return t, nil
	})
}

// clusterCache keeps decoded clusters by their guest cluster number.
type clusterCache struct{ lru }

func (c *clusterCache) init(clusterSize int64) {
	c.lru.init(int(min(decodedCacheBytes/clusterSize, 128)))
}

// readCompressed reads part of a compressed cluster. One that is wanted whole is decoded in place; otherwise it is
// kept, so that reading on in small steps decodes it once.
func (im *Image) readCompressed(p []byte, off int64, entry uint64) error {
	size := im.hdr.clusterSize()
	within := off & (size - 1)
	number := off >> im.hdr.clusterBits
	data := im.decoded.hit(number)
	if data == nil && within == 0 && int64(len(p)) == size {
		return im.load(p, entry)
	}
	if data == nil {
		var err error
		data, err = im.decoded.get(number, func() ([]byte, error) {
			b := make([]byte, size)
			return b, im.load(b, entry)
		})
		if err != nil {
			return err
		}
	}
	copy(p, data[within:])
	return nil
}
