package target

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// pollTime is how long a reader looks for data before it waits. An initiator on the same host
	// that answers at once does so in 20 to 30 us. QEMU's I/O threads look for up to 32 us, KVM for
	// 200 us.
	pollTime = 60 * time.Microsecond
	// maxUnpolled is how many times a reader waits without a look before, at most.
	maxUnpolled = 64
	// pollInterrupted is a time between two looks that only another thread, or a limit of processor
	// time, can take.
	pollInterrupted = time.Millisecond
	// pollBarred is for how long nobody looks after that: there is no processor to spare.
	pollBarred = 100 * time.Millisecond
)

// polling decides whether a reader looks for data for a while before it waits for it. A thread that
// waits sleeps, and until it is awake, by the kernel and on a virtual machine by the hypervisor,
// takes longer than a command: a guest that waits for each of its commands gets half as many again.
// Where data does not come soon, there is a look less and less often, and none where several
// readers have something to do: processors that one of them looks with are the others'. It belongs
// to the reader.
type polling struct {
	limit   *pollLimit
	id      uint64
	pause   int // how many waits come without a look after a look that was in vain
	waiting int // how many are left of these
}

// pollLimit is what the readers of all connections know of each other.
type pollLimit struct {
	ids     atomic.Uint64
	last    atomic.Uint64 // the id of whoever waited last
	looking atomic.Int32
	barred  atomic.Int64 // until when nobody looks, in nanoseconds since 1970
}

// pollers is that of the process.
var pollers pollLimit

func newPolling(limit *pollLimit) polling { return polling{limit: limit, id: limit.ids.Add(1)} }

// due says, before each wait, whether it begins with a look.
func (p *polling) due() bool {
	if p.limit.last.Swap(p.id) != p.id {
		return false
	}
	if p.waiting > 0 {
		p.waiting--
		return false
	}
	return true
}

// look tries until there is something, and says whether there was.
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

// enter asks whether there is a processor for a look; leave gives it back.
func (l *pollLimit) enter(now time.Time) bool {
	if now.UnixNano() < l.barred.Load() {
		return false
	}
	if int(l.looking.Add(1)) < runtime.GOMAXPROCS(0) {
		return true
	}
	l.leave()
	return false
}

func (l *pollLimit) leave()            { l.looking.Add(-1) }
func (l *pollLimit) bar(now time.Time) { l.barred.Store(now.Add(pollBarred).UnixNano()) }
