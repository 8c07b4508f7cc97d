package serving

import (
	"errors"
	"sync"
	"time"
)

// Late has the reads of a connection that wait for local storage, which has begun to read for them:
// see disk.Cached. They are executed in the order in which they came: when the first has its data,
// most others have theirs, too. The connection's reader executes them when it has nothing else to
// begin with, because waking another goroutine costs more than a read. If storage takes long, a
// goroutine executes them, so that other requests of the connection do not wait.
type Late[T any] struct {
	role *Reader
	few  int

	mu   sync.Mutex
	all  []T  // guarded by mu
	runs bool // guarded by mu; a goroutine has the role
	slow int  // guarded by mu; the goroutine executes all until this many reads in a row were quick
	// guarded by mu; requests of the peer that came before the first of all
	overtaken int
}

const (
	// quickRead is how long a reader may wait for storage. After a read that took longer, slowReads
	// reads in a row must be quicker.
	quickRead = time.Millisecond
	slowReads = 16
	// maxOvertaken is how many requests of the peer may overtake a waiting one. Otherwise a peer
	// with many requests under way could make it wait for ever.
	maxOvertaken = 64
)

// ErrLater is returned by an Executor's Blocks if the request is to be left to Late, so that other
// requests of the connection come first.
var ErrLater = errors.New("the request waits for storage")

// NewLate makes an empty Late; Close ends it. If more than few requests wait, the reader leaves
// them to the goroutine. loop executes the requests that Next returns, until Next returns false or
// its turn is no longer Reading. handOn is as for NewReader, and is also called before a goroutine
// begins.
func NewLate[T any](s *Disks, c *Conn, few int, loop func(*Turn), handOn func()) *Late[T] {
	l := &Late[T]{role: s.NewReader(c, loop, handOn), few: few}
	l.role.late = true
	return l
}

// Postpone leaves a request of a turn for later. A reader calls Await, or Take, before it waits for
// its peer, and Start before it ends. If the turn has lost its role meanwhile, the goroutine
// executes the request: the reader that has the role now may already wait for the peer.
func (l *Late[T]) Postpone(t *Turn, request T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, request)
	if !t.Reading || l.slow > 0 || len(l.all) > l.few {
		l.startLocked()
	}
}

// Await makes the reader execute requests until the peer has sent something, or until the goroutine
// executes the rest. ready reports whether the peer has, and does not wait. Await returns the first
// error of ready or execute.
func (l *Late[T]) Await(t *Turn, ready func() (bool, error), execute func(T) error) error {
	for t.Reading && l.alone() {
		if come, err := ready(); come || err != nil {
			l.overtake()
			return err
		}
		request, ok := l.Take()
		if !ok {
			return nil
		}
		if err := execute(request); err != nil {
			return err
		}
	}
	return nil
}

// overtake notes that the reader begins with another request.
func (l *Late[T]) overtake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.overtaken++; l.overtaken >= maxOvertaken {
		l.startLocked()
	}
}

// alone reports whether there are requests and no goroutine that executes them.
func (l *Late[T]) alone() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.all) > 0 && !l.runs
}

// Take returns the next request, for the reader. After false, the reader has nothing to do: there
// is no request, or the goroutine executes them.
func (l *Late[T]) Take() (request T, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slow > 0 {
		l.startLocked()
	}
	if l.runs {
		return request, false
	}
	return l.popLocked()
}

// Start lets the goroutine execute the requests.
func (l *Late[T]) Start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.startLocked()
}

func (l *Late[T]) startLocked() {
	if l.runs || len(l.all) == 0 {
		return
	}
	l.runs = true
	l.role.conn.Add()
	l.role.handOn()
	go func() {
		defer l.role.conn.Done()
		l.role.Run()
	}()
}

func (l *Late[T]) popLocked() (request T, ok bool) {
	if len(l.all) == 0 {
		return request, false
	}
	request, l.overtaken = l.all[0], 0
	l.all = append(l.all[:0], l.all[1:]...)
	return request, true
}

// Waits notes that the turn begins to wait for storage with a postponed request. Blocked follows.
// If the watchdog gives the role to another reader meanwhile, the goroutine executes the rest.
func (l *Late[T]) Waits(t *Turn) {
	if t.Late {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slow = slowReads
}

// Blocked notes how long a turn with a role has waited for storage.
func (l *Late[T]) Blocked(t *Turn, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case took >= quickRead:
		l.slow = slowReads
	case t.Late:
		l.slow = max(0, l.slow-1)
	case t.Reading:
		l.slow = 0
	}
}

// Next is the next request, for the goroutine. After false, the goroutine ends: there is no
// request, or the connection has ended.
func (l *Late[T]) Next() (request T, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.role.conn.Cause() == nil {
		request, ok = l.popLocked()
	}
	l.runs = ok
	return request, ok
}

// Waiting is how many requests have not begun.
func (l *Late[T]) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.all)
}

// Left removes and returns the requests that have not begun.
func (l *Late[T]) Left() []T {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.all
	l.all = nil
	return left
}

// Close ends the role.
func (l *Late[T]) Close() { l.role.Close() }
