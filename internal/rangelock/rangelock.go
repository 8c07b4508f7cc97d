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
	Read      Mode = iota // waits for Exclusive ones only
	Write                 // waits for Write and Exclusive ones
	Exclusive             // waits for all others
)

func (m Mode) conflicts(other Mode) bool {
	if m == Read || other == Read {
		return m == Exclusive || other == Exclusive
	}
	return true
}

// Span is a range, in whatever unit all callers of a table agree on. An empty one overlaps nothing.
type Span struct{ Off, Length int64 }

func (s Span) overlaps(o Span) bool {
	return s.Off < o.Off+o.Length && o.Off < s.Off+s.Length && s.Length > 0 && o.Length > 0
}

// Hold is a place in a Table. Its memory is the caller's, who must not touch it from Lock to
// Unlock. It can be used again afterwards.
type Hold struct {
	mode  Mode
	owner string
	span  Span
	more  []Span
	match func(owner string) bool // of Drain; else nil

	prev, next *Hold // guarded by Table.mu; in order of arrival
	// guarded by Table.mu; not nil while the hold waits; closed when it may go on
	turn chan struct{}
}

// Set makes h a hold of one range. The owner is for Writing and Drain; "" is nobody.
func (h *Hold) Set(mode Mode, owner string, off, length int64) {
	h.mode, h.owner, h.span, h.more = mode, owner, Span{off, length}, nil
}

// SetSpans makes h a hold of several ranges at once. They stay the caller's, who must not change
// them until Unlock.
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

// Table is the holds of one thing. The zero value is ready to use, and must not be copied then.
type Table struct {
	readers   atomic.Int64 // reads that are under way without a place in the table
	exclusive atomic.Int64 // Exclusive holds, those that wait included

	mu          sync.Mutex
	first, last *Hold // guarded by mu; in order of arrival, those that wait included
	waiting     int   // guarded by mu
}

// Lock waits until h has its ranges. Unlock must follow.
func (t *Table) Lock(h *Hold) {
	if turn := t.enter(h); turn != nil {
		<-turn
	}
}

// LockContext is Lock, but gives up when ctx ends. It returns the error of ctx then, and h has no
// place any more. Where nobody is in the way, it does not look at ctx.
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

// LockPair is Lock for a Read and a Write hold of one access. Both take their place before any
// wait: an Exclusive hold that overlapped both could otherwise come between them, and each would
// wait for the other.
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

// enter gives h its place. If it has to wait, the channel tells it when its turn has come.
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

// waitsLocked reports whether something is in the way of h.
func (t *Table) waitsLocked(h *Hold) bool {
	// Reads without a place only leave while exclusive is not zero, so that this comes to an end.
	if h.mode == Exclusive && t.readers.Load() != 0 {
		return true
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

// Unlock gives up the place of h. If h has none, nothing happens: one fault of a caller must not end
// a process that serves many disks.
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

// wakeLocked has those go on, of h and the later ones, that nothing is in the way of any more.
func (t *Table) wakeLocked(h *Hold) {
	for ; h != nil && t.waiting > 0; h = h.next {
		if h.turn != nil && !t.waitsLocked(h) {
			close(h.turn)
			h.turn = nil
			t.waiting--
		}
	}
}

// EnterRead admits a read of the range, and waits for its turn first where something is held
// exclusively. It reports whether h took a place for that. LeaveRead must follow.
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

// LeaveRead ends a read; placed is what EnterRead returned.
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

// Writing reports whether that owner has a hold that is no Read one, or waits for one.
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

// Drain waits until all holds that are no Read ones, and whose owner matches, have been given up,
// if they were there before. It does not wait for those that come later.
func (t *Table) Drain(match func(owner string) bool) {
	place := &Hold{match: match} // without a range it is in nobody's way
	t.Lock(place)
	t.Unlock(place)
}

// State is what a table holds. The zero value is that of one that nobody uses.
type State struct {
	Held      int // places, those that wait included
	Exclusive int // those of Held that are Exclusive
	Waiting   int
	Readers   int // reads without a place
}

// State is for tests and for whoever looks for the reason of a hang.
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
