package rawfile

import (
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
)

const (
	// readsFor is how long reads count after a call of Map.
	readsFor = 5 * time.Second
	// readsAfter is how old a call of Map must be for the next call to begin a new set of reads.
	// Two people may ask at nearly the same time.
	readsAfter = 500 * time.Millisecond
)

// Trail remembers where a guest has written, discarded and read, for the map of a disk. It
// remembers only cells of the map. It takes 1 KiB of memory, and another 1 KiB once it is read. Any
// number of goroutines may use it. A nil trail remembers nothing.
type Trail struct {
	size  func() int64             // of the disk, which may grow
	marks atomic.Pointer[marks]    // replaced when the disk has grown
	reads atomic.Pointer[cellsSet] // nil: not read yet

	mu     sync.Mutex
	before *cellsSet // guarded by mu; the reads before those in reads; nil: unknown
	asked  time.Time // guarded by mu
}

// marks are the changes of a guest.
type marks struct {
	written  *cellsSet
	discards *cellsSet // what was discarded, and not written since
}

// cellsSet is a set of the cells of a disk of that size.
type cellsSet struct {
	*Regions
	size int64
}

func newCellsSet(size int64) *cellsSet {
	return &cellsSet{NewRegions(size, disk.MapCellBytes(size)), size}
}

// has reports whether the range touches a cell of the set, or with all, whether it lies in cells of
// the set. If the disk has grown, the range may go past the end of the set.
func (s *cellsSet) has(off, length int64, all bool) bool {
	switch length = min(length, s.size-off); {
	case length <= 0:
		return false
	case all:
		return s.Covers(off, length)
	}
	return s.touches(off, length)
}

// NewTrail returns the trail of a guest that has done nothing yet.
func NewTrail(size func() int64) *Trail {
	t := &Trail{size: size}
	now := size()
	t.marks.Store(&marks{newCellsSet(now), newCellsSet(now)})
	return t
}

// upTo returns the marks of a disk that reaches at least to end.
func (t *Trail) upTo(end int64) *marks {
	m := t.marks.Load()
	if end <= m.written.size {
		return m
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	// Marks that are made in the old set meanwhile are lost. The map is only a picture.
	size := max(end, t.size())
	grown := &marks{newCellsSet(size), newCellsSet(size)}
	cell := grown.written.region
	for off := int64(0); off < m.written.size; off += cell {
		if m.written.has(off, cell, false) {
			grown.written.Add(off, 1)
		} else if m.discards.has(off, cell, true) {
			grown.discards.Add(off, 1)
		}
	}
	t.marks.Store(grown)
	return grown
}

// Write records a write.
func (t *Trail) Write(off, length int64) {
	if t == nil || length <= 0 {
		return
	}
	m := t.upTo(off + length)
	m.written.Add(off, length)
	if m.discards.touches(off, length) {
		m.discards.drop(off, length)
	}
}

// Discard records a discard. Cells of which only a part is discarded stay as they are.
func (t *Trail) Discard(off, length int64) {
	if t == nil {
		return
	}
	m := t.upTo(off + length)
	cell := m.written.region
	first, end := (off+cell-1)/cell*cell, (off+length)/cell*cell
	if off+length == m.written.size {
		end = m.written.size
	}
	if first < end {
		m.discards.Add(first, end-first)
		m.written.drop(first, end-first)
	}
}

// Read records a read.
func (t *Trail) Read(off, length int64) {
	if t == nil || length <= 0 {
		return
	}
	if r := t.reads.Load(); r != nil && off+length <= r.size {
		r.Add(off, length)
	}
}

// Mark adds the guest's work to a map. Before, the map shows all content of the disk's own file as
// copied.
func (t *Trail) Mark(m *disk.Map, now time.Time) {
	if t == nil {
		return
	}
	current, before := t.recent(m.Size, now)
	marks := t.marks.Load()
	for i := range m.Cells {
		c := &m.Cells[i]
		off, length := m.Range(i)
		switch {
		case marks.written.has(off, length, false):
			c.Copied, c.Written = 0, c.Copied
		case marks.discards.has(off, length, true):
			c.Copied, c.Hole = 0, c.Hole+c.Copied
		}
		c.Read = current.has(off, length, false) || before != nil && before.has(off, length, false)
	}
}

// recent returns where the guest has read since the last call of Map.
func (t *Trail) recent(size int64, now time.Time) (current, before *cellsSet) {
	t.mu.Lock()
	defer t.mu.Unlock()
	current = t.reads.Load()
	if current != nil && now.Sub(t.asked) < readsAfter {
		return current, t.before
	}
	t.before = nil
	if now.Sub(t.asked) < readsFor {
		t.before = current
	}
	t.asked, current = now, newCellsSet(size)
	t.reads.Store(current)
	return current, t.before
}
