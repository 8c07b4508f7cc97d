package scsi

import (
	"sync"
	"sync/atomic"
)

// rangeTable orders the accesses to one logical unit that must not overtake each other.
//
// A command can be aborted while its disk call still runs. So that the stale data never lands on top of a
// newer write, every write holds its range for the duration of its disk calls, and a later one that overlaps waits,
// in order of arrival. COMPARE AND WRITE holds its range exclusively: reads wait too.
//
// A read takes no lock unless some range is held exclusively; then it takes its place in the table.
// Lock order: mu is innermost.
type rangeTable struct {
	readers   atomic.Int64 // reads that are under way without a place in held
	exclusive atomic.Int64 // exclusive holds, waiting or granted

	mu      sync.Mutex
	changed *sync.Cond
	waiting int     // guarded by mu; goroutines in changed.Wait
	held    []*hold // guarded by mu; in order of arrival, waiting ones too
}

type holdKind uint8

const (
	holdRead holdKind = iota
	holdWrite
	holdExclusive
)

// conflicts reports whether two overlapping holds exclude each other.
func (k holdKind) conflicts(other holdKind) bool {
	if k == holdRead || other == holdRead {
		return k == holdExclusive || other == holdExclusive
	}
	return true
}

// span is a range of bytes of a disk.
type span struct{ off, length int64 }

func (s span) overlaps(o span) bool {
	return s.length > 0 && o.length > 0 && s.off < o.off+o.length && o.off < s.off+s.length
}

// hold is a place in a rangeTable. Its owner provides the memory.
type hold struct {
	kind  holdKind
	by    *initiator
	one   [1]span // backs spans when there is but one
	spans []span
}

// set makes h a hold of a single range.
func (h *hold) set(kind holdKind, by *initiator, off, length int64) {
	h.kind, h.by = kind, by
	h.one[0] = span{off, length}
	h.spans = h.one[:]
}

func (h *hold) overlaps(o *hold) bool {
	for _, a := range h.spans {
		for _, b := range o.spans {
			if a.overlaps(b) {
				return true
			}
		}
	}
	return false
}

func (r *rangeTable) init() { r.changed = sync.NewCond(&r.mu) }

// lock waits until h has its ranges. unlock must follow.
func (r *rangeTable) lock(h *hold) {
	if h.kind == holdExclusive {
		r.exclusive.Add(1)
	}
	r.mu.Lock()
	r.held = append(r.held, h)
	for r.blockedLocked(h) {
		r.waiting++
		r.changed.Wait()
		r.waiting--
	}
	r.mu.Unlock()
}

// lockOne is lock for a single range.
func (r *rangeTable) lockOne(h *hold, kind holdKind, by *initiator, off, length int64) {
	h.set(kind, by, off, length)
	r.lock(h)
}

// lockPair is lock for a read and a write of one command on the same unit. Both take their place before any wait: an
// exclusive command that overlapped both could otherwise come between them, and each would wait for the other.
func (r *rangeTable) lockPair(read, write *hold) {
	r.mu.Lock()
	r.held = append(r.held, read, write)
	for r.blockedLocked(read) || r.blockedLocked(write) {
		r.waiting++
		r.changed.Wait()
		r.waiting--
	}
	r.mu.Unlock()
}

// blockedLocked reports whether an earlier hold stands in the way of h.
func (r *rangeTable) blockedLocked(h *hold) bool {
	// Reads without a place only leave while exclusive is not zero, so that this comes to an end.
	if h.kind == holdExclusive && r.readers.Load() != 0 {
		return true
	}
	for _, earlier := range r.held {
		if earlier == h {
			return false
		}
		if h.kind.conflicts(earlier.kind) && h.overlaps(earlier) {
			return true
		}
	}
	return false
}

func (r *rangeTable) unlock(h *hold) {
	r.mu.Lock()
	for i, o := range r.held {
		if o == h {
			copy(r.held[i:], r.held[i+1:])
			r.held[len(r.held)-1] = nil
			r.held = r.held[:len(r.held)-1]
			break
		}
	}
	if r.waiting > 0 {
		r.changed.Broadcast()
	}
	r.mu.Unlock()
	if h.kind == holdExclusive {
		r.exclusive.Add(-1)
	}
}

// enterRead admits a read of the range and reports whether it took a place in the table; leaveRead ends it.
func (r *rangeTable) enterRead(h *hold, by *initiator, off, length int64) (placed bool) {
	r.readers.Add(1)
	if r.exclusive.Load() == 0 {
		return false
	}
	r.leaveReaders()
	r.lockOne(h, holdRead, by, off, length)
	return true
}

func (r *rangeTable) leaveRead(h *hold, placed bool) {
	if placed {
		r.unlock(h)
		return
	}
	r.leaveReaders()
}

func (r *rangeTable) leaveReaders() {
	if r.readers.Add(-1) == 0 && r.exclusive.Load() != 0 {
		r.mu.Lock()
		r.changed.Broadcast()
		r.mu.Unlock()
	}
}

// writing reports whether a write of the initiator is under way.
func (r *rangeTable) writing(by *initiator) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.held {
		// Who has gone and come back is another *initiator by then.
		if h.kind != holdRead && h.by != nil && h.by.name == by.name {
			return true
		}
	}
	return false
}
