package metrics

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	// maxInitiators limits the label values that peers choose.
	maxInitiators = 64

	// maxPairs is how many pairs of an initiator and a LUN have their own counters. Other
	// initiators of a LUN are counted together, and shown for each of maxShared LUNs; those of
	// further LUNs are shown together. A pair takes some 2 KiB, and 16 KiB more while a page is
	// made.
	maxPairs  = 2048
	maxShared = 1024

	other = "other"
)

// label makes a text a valid label value. Prometheus takes only UTF-8, and one bad value would make
// the whole scrape fail.
func label(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// table maps names to values and makes a value on first use. Readers need no lock: a new name
// copies the map, which happens a limited number of times.
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

// all returns the current map. Callers must not change it.
func (t *table[K, V]) all() map[K]V {
	if m := t.live.Load(); m != nil {
		return *m
	}
	return nil
}

// put returns the value of key. If there is none, create makes it.
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

// drop removes the keys that are gone, and returns how many these were.
func (t *table[K, V]) drop(gone func(K) bool) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.all()
	next := make(map[K]V, len(old))
	for key, v := range old {
		if !gone(key) {
			next[key] = v
		}
	}
	if len(next) < len(old) {
		t.live.Store(&next)
	}
	return len(old) - len(next)
}
