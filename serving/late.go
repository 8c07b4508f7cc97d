package serving

import (
	"errors"
	"slices"
	"sync"
)

// Late has the requests of a connection that wait for the storage of this machine, which has begun
// to read for them: see disk.Cached. A second reader executes them in the order in which they came.
// When the first has its data, most others have theirs, too. A goroutine for each would cost more
// than the request.
type Late[T any] struct {
	role *Reader

	mu   sync.Mutex
	all  []T  // guarded by mu
	runs bool // guarded by mu; a goroutine has the role
}

// ErrLater is what an Executor's Blocks returns if the request is to be left to Late, so that other
// requests of the connection come first.
var ErrLater = errors.New("the request waits for storage")

// NewLate makes a Late without a request; Close ends it. Loop executes what Next returns, until
// that returns false or its turn is no longer Reading. HandOn is as for NewReader, and is also
// called before a goroutine begins.
func NewLate[T any](s *Disks, c *Conn, loop func(*Turn), handOn func()) *Late[T] {
	l := &Late[T]{role: s.NewReader(c, loop, handOn)}
	l.role.late = true
	return l
}

// Postpone leaves a request to the reader.
func (l *Late[T]) Postpone(request T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, request)
	l.runLocked()
}

// Return leaves a request to the reader, before all others.
func (l *Late[T]) Return(request T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = slices.Insert(l.all, 0, request)
	l.runLocked()
}

// runLocked starts the goroutine, unless it runs.
func (l *Late[T]) runLocked() {
	if !l.runs {
		l.runs = true
		l.role.conn.Add()
		l.role.handOn()
		go func() {
			defer l.role.conn.Done()
			l.role.Run()
		}()
	}
}

// Next is the next request. After false, the goroutine ends: there is none, or the connection has
// ended.
func (l *Late[T]) Next() (request T, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) == 0 || l.role.conn.Cause() != nil {
		l.runs = false
		return request, false
	}
	request = l.all[0]
	l.all = append(l.all[:0], l.all[1:]...)
	return request, true
}

// Waiting is how many requests nobody has begun with.
func (l *Late[T]) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.all)
}

// Left takes away the requests that nobody has begun with.
func (l *Late[T]) Left() []T {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.all
	l.all = nil
	return left
}

// Close ends the role.
func (l *Late[T]) Close() { l.role.Close() }
