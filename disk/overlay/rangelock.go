package overlay

import (
	"slices"
	"sync"
)

// rangeLocks gives exclusive use of ranges of blocks. Ranges that do not overlap never wait for each other, and those that do have
// their turn in the order of their calls: a large one is not passed by small ones for ever. The zero value is ready to use.
type rangeLocks struct {
	mu      sync.Mutex
	changed *sync.Cond   // a range was freed; made with the first wait
	next    uint64       // guarded by mu
	queue   []blockRange // guarded by mu; what is held or waited for, in the order of the calls
}

type blockRange struct {
	first, last int64
	number      uint64 // of the call
}

// lock waits until it is the turn of the blocks first to last, and holds them.
func (l *rangeLocks) lock(first, last int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := blockRange{first, last, l.next}
	l.next++
	l.queue = append(l.queue, r)
	for l.waitsLocked(r) {
		if l.changed == nil {
			l.changed = sync.NewCond(&l.mu)
		}
		l.changed.Wait()
	}
}

// unlock frees a range that lock was called for. Of equal ones the first is the one that is held.
func (l *rangeLocks) unlock(first, last int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.queue, func(r blockRange) bool { return r.first == first && r.last == last })
	l.queue = slices.Delete(l.queue, i, i+1)
	if l.changed != nil {
		l.changed.Broadcast()
	}
}

// waitsLocked reports whether an earlier range overlaps this one.
func (l *rangeLocks) waitsLocked(r blockRange) bool {
	for _, other := range l.queue {
		if other.number == r.number {
			return false
		}
		if r.first <= other.last && other.first <= r.last {
			return true
		}
	}
	return false
}
