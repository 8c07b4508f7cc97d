package disk

import "sync"

// rangeLocks gives exclusive use of ranges of blocks. Ranges that do not overlap never wait for each other. The zero
// value is ready to use.
type rangeLocks struct {
	mu      sync.Mutex
	changed *sync.Cond   // a range was freed; made with the first wait
	held    []blockRange // guarded by mu
}

type blockRange struct{ first, last int64 }

// lock waits until no block of first to last is held, and holds them.
func (l *rangeLocks) lock(first, last int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.overlaps(first, last) {
		if l.changed == nil {
			l.changed = sync.NewCond(&l.mu)
		}
		l.changed.Wait()
	}
	l.held = append(l.held, blockRange{first, last})
}

// unlock frees a range that lock was called for.
func (l *rangeLocks) unlock(first, last int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, r := range l.held {
		if r == (blockRange{first, last}) {
			l.held[i] = l.held[len(l.held)-1]
			l.held = l.held[:len(l.held)-1]
			break
		}
	}
	if l.changed != nil {
		l.changed.Broadcast()
	}
}

func (l *rangeLocks) overlaps(first, last int64) bool {
	for _, r := range l.held {
		if first <= r.last && r.first <= last {
			return true
		}
	}
	return false
}
