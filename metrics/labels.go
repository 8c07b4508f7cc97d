package metrics

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	// maxInitiators and maxReasons bound label values that come from peers.
	maxInitiators = 64
	maxReasons    = 64

	other = "other"
)

// label makes a text a valid label value: Prometheus takes UTF-8 only, and one bad value would make
// the whole page fail.
func label(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// table maps names to values that are made at first sight, for readers without locks: a new name
// copies the map, which happens a bounded number of times.
type table[K comparable, V any] struct {
	mu   sync.Mutex // serialises writers
	live atomic.Pointer[map[K]V]
}

func (t *table[K, V]) find(key K) (V, bool) {
	var none V
	m := t.live.Load()
	if m == nil {
		return none, false
	}
	v, ok := (*m)[key]
	return v, ok
}

// all returns what is there; it may not be changed.
func (t *table[K, V]) all() map[K]V {
	if m := t.live.Load(); m != nil {
		return *m
	}
	return nil
}

// put returns the value of key, made by create if there is none.
func (t *table[K, V]) put(key K, create func(size int) V) V {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v, ok := t.find(key); ok {
		return v
	}
	old := t.all()
	next := make(map[K]V, len(old)+1)
	maps.Copy(next, old)
	v := create(len(old))
	next[key] = v
	t.live.Store(&next)
	return v
}

// labelTable counts by a short label that should come from a small set, and bounds it if it does
// not.
type labelTable struct {
	counters table[string, *atomic.Uint64]
	rest     atomic.Uint64
}

func newLabelTable() *labelTable { return &labelTable{} }

func (t *labelTable) add(name string) {
	if name == "" {
		name = "unknown"
	}
	name = label(name)
	c, ok := t.counters.find(name)
	switch {
	case ok:
	case name == other || len(t.counters.all()) >= maxReasons:
		c = &t.rest
	default:
		c = t.counters.put(name, func(size int) *atomic.Uint64 {
			if size >= maxReasons {
				return &t.rest
			}
			return new(atomic.Uint64)
		})
	}
	c.Add(1)
}

// each calls f for every label and its count.
func (t *labelTable) each(f func(name string, n uint64)) {
	for name, c := range t.counters.all() {
		if c != &t.rest {
			f(name, c.Load())
		}
	}
	if n := t.rest.Load(); n > 0 {
		f(other, n)
	}
}
