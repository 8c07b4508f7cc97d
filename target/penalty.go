package target

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// freeFailures is how often an address may fail to authenticate before it is slowed down.
	freeFailures = 3
	// firstDelay is the delay of the first login after that. Each further failure doubles it.
	firstDelay = 100 * time.Millisecond
	// penaltyMemory is how long a failure is remembered.
	penaltyMemory = time.Minute
	// maxPenalties is how many addresses are remembered.
	maxPenalties = 1024
)

// penalties slows down addresses from which authentication fails again and again. A login from such
// an address waits before it begins, whether or not it will succeed, so the wait tells nothing. The
// wait is limited, so that nobody is locked out by a neighbour behind the same address. Each
// connection waits by itself.
type penalties struct {
	limit time.Duration // the longest delay

	mu    sync.Mutex
	table map[netip.Addr]penalty // guarded by mu
}

type penalty struct {
	failures int
	last     int64 // coarse clock
}

// failed counts a failure of authentication.
func (p *penalties) failed(from netip.Addr, now int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, known := p.table[from]
	if !known && len(p.table) >= maxPenalties {
		p.forgetLocked(now)
	}
	if now-e.last > int64(penaltyMemory) {
		e.failures = 0
	}
	e.failures++
	e.last = now
	p.table[from] = e
}

// forgetLocked makes room. It removes expired addresses, or else the address whose last failure is
// the oldest.
func (p *penalties) forgetLocked(now int64) {
	var oldest netip.Addr
	last := int64(0)
	for from, e := range p.table {
		if now-e.last > int64(penaltyMemory) {
			delete(p.table, from)
		} else if last == 0 || e.last < last {
			oldest, last = from, e.last
		}
	}
	if len(p.table) >= maxPenalties {
		delete(p.table, oldest)
	}
}

// delay returns how long a login from an address must wait.
func (p *penalties) delay(from netip.Addr, now int64) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.table[from]
	if e.failures < freeFailures || now-e.last > int64(penaltyMemory) {
		return 0
	}
	return min(firstDelay<<min(e.failures-freeFailures, 16), p.limit)
}
