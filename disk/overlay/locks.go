package overlay

import (
	"sync"

	"kubevirt.io/disk/internal/rangelock"
)

// blockLocks lock ranges of blocks. Waiters are served first in, first out. The zero value is ready
// to use.
type blockLocks struct{ table rangelock.Table }

// holds are *rangelock.Hold.
var holds = sync.Pool{New: func() any { return new(rangelock.Hold) }}

// lock waits for the blocks first to last, and holds them until unlock.
func (l *blockLocks) lock(first, last int64) *rangelock.Hold {
	h := holds.Get().(*rangelock.Hold)
	h.Set(rangelock.Write, "", first, last-first+1)
	l.table.Lock(h)
	return h
}

func (l *blockLocks) unlock(h *rangelock.Hold) {
	l.table.Unlock(h)
	holds.Put(h)
}
