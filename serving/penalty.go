package serving

import (
	"sync"
	"time"
)

const (
	// freeFailures is how often a peer may fail before it is slowed down.
	freeFailures = 3
	// firstDelay is the delay of the next connection. Each further failure doubles the delay.
	firstDelay = 100 * time.Millisecond
	// penaltyMemory is how long a failure is remembered.
	penaltyMemory = time.Minute
	// maxPenalties is how many peers are remembered.
	maxPenalties = 1024
)

// Penalties slow down peers that fail again and again: those that cannot authenticate, and those
// whose connections break because of what they send, if they come back at once. A connection of
// such a peer waits before it begins, whether or not it will succeed, so the wait reveals nothing.
// The wait is limited, so that a neighbour behind the same address locks nobody out. Each
// connection waits by itself. Any number of goroutines may call the methods.
type Penalties struct {
	limit time.Duration

	mu    sync.Mutex
	table map[string]penalty // guarded by mu
}

type penalty struct {
	failures int
	last     time.Time
}

// NewPenalties makes penalties of at most limit. With a limit of 0 or less nobody waits.
func NewPenalties(limit time.Duration) *Penalties {
	return &Penalties{limit: limit, table: make(map[string]penalty)}
}

// Failed counts a failure of a peer, and reports whether its next connection will wait.
func (p *Penalties) Failed(peer string, now time.Time) (slowed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, known := p.table[peer]
	if !known && len(p.table) >= maxPenalties {
		p.forgetLocked(now)
	}
	if now.Sub(e.last) > penaltyMemory {
		e.failures = 0
	}
	e.failures++
	e.last = now
	p.table[peer] = e
	return e.failures >= freeFailures
}

// forgetLocked makes room. It removes expired peers, or else the peer whose last failure is the
// oldest.
func (p *Penalties) forgetLocked(now time.Time) {
	var oldest string
	var last time.Time
	for peer, e := range p.table {
		if now.Sub(e.last) > penaltyMemory {
			delete(p.table, peer)
		} else if last.IsZero() || e.last.Before(last) {
			oldest, last = peer, e.last
		}
	}
	if len(p.table) >= maxPenalties {
		delete(p.table, oldest)
	}
}

// Delay returns how long a connection of a peer must wait before it begins. slowed says that the
// peer has failed often, even if the delay is 0.
func (p *Penalties) Delay(peer string, now time.Time) (delay time.Duration, slowed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.table[peer]
	if e.failures < freeFailures || now.Sub(e.last) > penaltyMemory {
		return 0, false
	}
	return max(min(firstDelay<<min(e.failures-freeFailures, 16), p.limit), 0), true
}
