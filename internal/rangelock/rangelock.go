package rangelock

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// Mode says which holds exclude each other where they overlap.
type Mode uint8

const (
	Read      Mode = iota // waits only for Exclusive
	Write                 // waits for Write and Exclusive
	Exclusive             // waits for all
)

func (m Mode) conflicts(other Mode) bool {
	if m == Read || other == Read {
		return m == Exclusive || other == Exclusive
	}
	return true
}

// Span is a range. All callers of a table use the same unit. An empty range overlaps nothing.
type Span struct{ Off, Length int64 }

func (s Span) overlaps(o Span) bool {
	return s.Off < o.Off+o.Length && o.Off < s.Off+s.Length && s.Length > 0 && o.Length > 0
}

// Hold is a place in a Table. It belongs to the caller, which must not touch it from Lock to
// Unlock, and can reuse it afterwards.
type Hold struct {
	mode  Mode
	owner string
	span  Span
	more  []Span
	match func(owner string) bool // for Drain; otherwise nil

	prev, next *Hold // guarded by Table.mu; in order of arrival
	// guarded by Table.mu; not nil while the hold waits; closed when its turn has come
	turn chan struct{}
}

// Set makes h a hold of one range. Writing and Drain select by the owner; "": none.
func (h *Hold) Set(mode Mode, owner string, off, length int64) {
	h.mode, h.owner, h.span, h.more = mode, owner, Span{off, length}, nil
}

// SetSpans makes h a hold of several ranges at once. The caller must not change spans until Unlock.
func (h *Hold) SetSpans(mode Mode, owner string, spans []Span) {
	h.mode, h.owner, h.span, h.more = mode, owner, Span{}, spans
}

func (h *Hold) overlaps(o *Hold) bool {
	switch {
	case h.span.overlaps(o.span):
		return true
	case h.more == nil && o.more == nil: // nearly always
		return false
	}
	return slices.ContainsFunc(o.more, h.span.overlaps) ||
		slices.ContainsFunc(h.more, func(s Span) bool {
			return s.overlaps(o.span) || slices.ContainsFunc(o.more, s.overlaps)
		})
}

// Table has all holds of one disk or logical unit. The zero value is ready to use. A table must not
// be copied after its first use.
type Table struct {
	readers   atomic.Int64 // reads under way without a place in the table
	exclusive atomic.Int64 // Exclusive holds, waiting ones included

	mu          sync.Mutex
	first, last *Hold // guarded by mu; in order of arrival, waiting ones included
	waiting     int   // guarded by mu
}

// Lock waits until h has its ranges. Unlock must follow.
func (t *Table) Lock(h *Hold) {
	if turn := t.enter(h); turn != nil {
		<-turn
	}
}

// LockContext is like Lock, but gives up when ctx ends. Then it returns the error of ctx, and h has
// no place any more. If it need not wait, it does not look at ctx.
func (t *Table) LockContext(ctx context.Context, h *Hold) error {
	turn := t.enter(h)
	if turn == nil {
		return nil
	}
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
		t.Unlock(h)
		return ctx.Err()
	}
}

// LockPair is Lock for a Read and a Write hold of one access. Both take their places before either
// waits. Otherwise an Exclusive hold that overlaps both could come between them, and a deadlock
// would follow.
func (t *Table) LockPair(read, write *Hold) {
	t.mu.Lock()
	first, second := t.enterLocked(read), t.enterLocked(write)
	t.mu.Unlock()
	for _, turn := range [...]chan struct{}{first, second} {
		if turn != nil {
			<-turn
		}
	}
}

// enter gives h its place. If h must wait, enter returns a channel that is closed when its turn has
// come.
func (t *Table) enter(h *Hold) (turn chan struct{}) {
	if h.mode == Exclusive {
		t.exclusive.Add(1)
	}
	t.mu.Lock()
	turn = t.enterLocked(h)
	t.mu.Unlock()
	return turn
}

func (t *Table) enterLocked(h *Hold) chan struct{} {
	h.prev = t.last
	if t.last == nil {
		t.first = h
	} else {
		t.last.next = h
	}
	t.last = h
	if !t.waitsLocked(h) {
		return nil
	}
	h.turn = make(chan struct{})
	t.waiting++
	return h.turn
}

// waitsLocked reports whether h must wait for an earlier hold.
func (t *Table) waitsLocked(h *Hold) bool {
	// While exclusive is not zero, no new reads enter without a place, so this wait ends.
	if h.mode == Exclusive && t.readers.Load() != 0 {
		return true
	}
	if h.mode == Read && h.match == nil && t.exclusive.Load() == 0 { // many may wait for a registry
		return false
	}
	for earlier := h.prev; earlier != nil; earlier = earlier.prev {
		if h.overlaps(earlier) && h.mode.conflicts(earlier.mode) {
			return true
		}
		if h.match != nil && earlier.mode != Read && earlier.owner != "" && h.match(earlier.owner) {
			return true
		}
	}
	return false
}

// Unlock removes h from its place. If h has no place, nothing happens: a fault of one caller must
// not end a process that serves many disks.
func (t *Table) Unlock(h *Hold) {
	t.mu.Lock()
	if h.prev == nil && t.first != h {
		t.mu.Unlock()
		return
	}
	later := h.next
	if h.prev == nil {
		t.first = later
	} else {
		h.prev.next = later
	}
	if later == nil {
		t.last = h.prev
	} else {
		later.prev = h.prev
	}
	h.prev, h.next = nil, nil
	if h.turn != nil { // it gives up before its turn
		h.turn = nil
		t.waiting--
	}
	if t.waiting > 0 {
		t.wakeLocked(later)
	}
	t.mu.Unlock()
	if h.mode == Exclusive {
		t.exclusive.Add(-1)
	}
}

// wakeLocked wakes h and later holds that no longer conflict with an earlier one.
func (t *Table) wakeLocked(h *Hold) {
	for ; h != nil && t.waiting > 0; h = h.next {
		if h.turn != nil && !t.waitsLocked(h) {
			close(h.turn)
			h.turn = nil
			t.waiting--
		}
	}
}

// EnterRead admits a read of the range. While anything is held exclusively, h takes a place and
// waits for its turn. EnterRead reports whether it did. LeaveRead must follow.
func (t *Table) EnterRead(h *Hold, owner string, off, length int64) (placed bool) {
	t.readers.Add(1)
	if t.exclusive.Load() == 0 {
		return false
	}
	t.leaveReaders()
	h.Set(Read, owner, off, length)
	t.Lock(h)
	return true
}

// LeaveRead ends a read. placed is the result of EnterRead.
func (t *Table) LeaveRead(h *Hold, placed bool) {
	if placed {
		t.Unlock(h)
		return
	}
	t.leaveReaders()
}

func (t *Table) leaveReaders() {
	if t.readers.Add(-1) == 0 && t.exclusive.Load() != 0 {
		t.mu.Lock()
		t.wakeLocked(t.first)
		t.mu.Unlock()
	}
}

// Writing reports whether the owner has or waits for a Write or Exclusive hold.
func (t *Table) Writing(owner string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for h := t.first; h != nil; h = h.next {
		if h.mode != Read && h.owner == owner {
			return true
		}
	}
	return false
}

// Drain waits for the Write and Exclusive holds, waiting ones included, whose owner matches. It
// does not wait for holds that come later.
func (t *Table) Drain(match func(owner string) bool) {
	place := &Hold{match: match} // without a range, it conflicts with nothing
	t.Lock(place)
	t.Unlock(place)
}

// State is the state of a table. It is zero if nobody uses the table.
type State struct {
	Held      int // places, waiting ones included
	Exclusive int // how many of Held are Exclusive
	Waiting   int
	Readers   int // reads without a place
}

// State returns the state of the table, for tests and to find the reason of a hang.
func (t *Table) State() State {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := State{
		Exclusive: int(t.exclusive.Load()), Waiting: t.waiting, Readers: int(t.readers.Load()),
	}
	for h := t.first; h != nil; h = h.next {
		s.Held++
	}
	return s
}
