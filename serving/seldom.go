package serving

import (
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"
)

// maxKinds is how many kinds a Seldom remembers, and so the most lines in an interval. There must
// be a limit: kinds may contain names that anybody can make up.
const maxKinds = 64

// Seldom limits log lines of which a peer could cause a thousand a second: one of each kind in an
// interval. A new kind is not logged while maxKinds others are remembered. Any number of goroutines
// may use it.
type Seldom[K comparable] struct {
	every time.Duration

	mu   sync.Mutex
	last map[K]*told // guarded by mu
}

// told says when a kind was logged last, and how many lines were suppressed since.
type told struct {
	at         time.Time
	suppressed int64
}

// NewSeldom makes a Seldom with the interval every.
func NewSeldom[K comparable](every time.Duration) *Seldom[K] {
	return &Seldom[K]{every: every, last: map[K]*told{}}
}

// Admit reports whether to write a line now, and how many of its kind were suppressed since the
// last.
func (l *Seldom[K]) Admit(kind K, now time.Time) (suppressed int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.last[kind]
	switch {
	case before != nil && now.Sub(before.at) < l.every:
		before.suppressed++
		return 0, false
	case before != nil:
		suppressed = before.suppressed
	case !l.makeRoomLocked(now):
		return 0, false
	}
	l.last[kind] = &told{at: now}
	return suppressed, true
}

// makeRoomLocked reports whether there is room for another kind. If not, it first forgets kinds
// that were logged long ago.
func (l *Seldom[K]) makeRoomLocked(now time.Time) bool {
	if len(l.last) < maxKinds {
		return true
	}
	maps.DeleteFunc(l.last, func(_ K, t *told) bool { return now.Sub(t.at) >= l.every })
	return len(l.last) < maxKinds
}

// Unsaid are the fields that say how many lines of the same kind were suppressed.
func Unsaid(suppressed int64) []zap.Field {
	if suppressed == 0 {
		return nil
	}
	return []zap.Field{zap.Int64("not_logged_since", suppressed)}
}
