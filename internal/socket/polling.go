package socket

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// pollTime is how long a reader polls for data before it waits. An initiator on the same host
	// that answers at once takes 20 to 30 us. QEMU's I/O threads poll for up to 32 us, KVM for 200
	// us.
	pollTime = 60 * time.Microsecond
	// maxUnpolled is how many times in a row a reader may wait without polling.
	maxUnpolled = 64
	// pollInterrupted is the time between two attempts that means that another thread, or a limit
	// of processor time, has interrupted the polling.
	pollInterrupted = time.Millisecond
	// pollBarred is the time without polling after that: no processor is free.
	pollBarred = 100 * time.Millisecond
)

// polling decides whether a reader polls for data before it waits. A thread that waits sleeps, and
// the kernel, and on a virtual machine the hypervisor, takes longer to wake it than a command
// takes. With polling, a guest that waits for each of its commands executes half as many again. If
// data does not come soon, the reader polls less and less often. If several readers have work, none
// polls, because they need the processors. Only the reader uses it.
type polling struct {
	limit   *PollLimit
	id      uint64
	pause   int // how many waits without polling follow an unsuccessful poll
	waiting int // how many of these are left
}

// PollLimit is shared by the readers of all connections of a server.
type PollLimit struct {
	ids     atomic.Uint64
	last    atomic.Uint64 // the id of the last reader that waited
	looking atomic.Int32
	barred  atomic.Int64 // until when polling is barred, in nanoseconds since 1970
}

func newPolling(limit *PollLimit) polling {
	if limit == nil {
		return polling{}
	}
	return polling{limit: limit, id: limit.ids.Add(1)}
}

// due is called before each wait and reports whether to poll first.
func (p *polling) due() bool {
	if p.limit == nil || p.limit.last.Swap(p.id) != p.id {
		return false
	}
	if p.waiting > 0 {
		p.waiting--
		return false
	}
	return true
}

// look calls try until it succeeds or the time is over, and reports whether it succeeded.
func (p *polling) look(try func() (done bool)) (found bool) {
	begin := time.Now()
	if !p.limit.enter(begin) {
		return false
	}
	defer p.limit.leave()
	for last := begin; last.Sub(begin) < pollTime; {
		if try() {
			p.pause /= 2
			return true
		}
		now := time.Now()
		if now.Sub(last) > pollInterrupted {
			p.limit.bar(now)
		}
		last = now
	}
	p.pause = min(max(2*p.pause, 1), maxUnpolled)
	p.waiting = p.pause
	return false
}

// enter reports whether a processor is free for polling. If so, leave must follow.
func (l *PollLimit) enter(now time.Time) bool {
	if now.UnixNano() < l.barred.Load() {
		return false
	}
	if int(l.looking.Add(1)) < runtime.GOMAXPROCS(0) {
		return true
	}
	l.leave()
	return false
}

func (l *PollLimit) leave()            { l.looking.Add(-1) }
func (l *PollLimit) bar(now time.Time) { l.barred.Store(now.Add(pollBarred).UnixNano()) }
