package cache

import (
	"errors"
	"io/fs"
	"slices"
	"sync"
	"time"
)

const (
	// orders is how many chunks of an order are fetched at once; beside is how many while a reader
	// waits for a fetch.
	orders = 8
	beside = 2
	// besideLook is how often to check whether readers still wait.
	besideLook = 5 * time.Millisecond
	// orderPart is the part of the cache's size that an order may take. Otherwise the end of the
	// order could replace its beginning before that is read.
	orderPart = 4
)

// order is a list of chunks that are fetched one after the other, before they are read.
type order struct {
	mu   sync.Mutex
	runs [][2]int64 // guarded by mu; the runs left: first chunk and how many
	left int64      // guarded by mu; how many chunks it may still fetch
	busy int        // guarded by mu; how many are being fetched
}

// Order fetches chunks in the given order, in the background. Each run is a chunk and how many
// chunks from there on. Readers come first, and an order that exceeds its part of the cache is cut.
// The channel is closed when there is nothing left to fetch.
func (b *Blob) Order(runs [][2]int64) <-chan struct{} {
	o := &order{runs: slices.Clone(runs),
		left: (b.opt.Size + b.opt.ChunkSize - 1) / b.opt.ChunkSize}
	if size := b.cache.opt.Size; size > 0 {
		o.left = min(o.left, size/orderPart/b.opt.ChunkSize)
	}
	done := make(chan struct{})
	var all sync.WaitGroup
	for range orders {
		all.Add(1)
		b.cache.work.Go(func() {
			defer all.Done()
			b.follow(o)
		})
	}
	b.cache.work.Go(func() {
		all.Wait()
		close(done)
	})
	return done
}

// follow fetches chunks of an order until there are none.
func (b *Blob) follow(o *order) {
	for b.giveWay(o) {
		chunk, ok := o.next()
		if !ok {
			return
		}
		var err error
		b.mu.Lock()
		known := b.calls[chunk] != nil || b.recentlyLocked(chunk) != nil
		b.mu.Unlock()
		if !known && !b.Has(chunk*b.opt.ChunkSize, b.length(chunk)) {
			_, err = b.chunk(b.cache.life, chunk, true) // a reader reports errors
		}
		o.mu.Lock()
		if o.busy--; errors.Is(err, fs.ErrClosed) {
			o.left = 0 // the readers have ended
		}
		o.mu.Unlock()
	}
}

func (o *order) next() (chunk int64, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.runs) > 0 && o.runs[0][1] <= 0 {
		o.runs = o.runs[1:]
	}
	if len(o.runs) == 0 || o.left <= 0 {
		return 0, false
	}
	chunk = o.runs[0][0]
	o.runs[0][0]++
	o.runs[0][1]--
	o.left--
	o.busy++
	return chunk, true
}

// giveWay waits while readers wait for fetches and enough of the order is under way. It returns
// false when the cache is being closed.
func (b *Blob) giveWay(o *order) bool {
	for b.cache.life.Err() == nil {
		o.mu.Lock()
		busy := o.busy
		o.mu.Unlock()
		if b.turns.wanted.Load() == 0 || busy < beside {
			return true
		}
		select {
		case <-b.cache.life.Done():
		case <-time.After(besideLook):
		}
	}
	return false
}
