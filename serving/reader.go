package serving

import (
	"sync"
	"sync/atomic"
	"time"
)

// A connection's reader executes requests itself. The page cache answers nearly all of them in
// microseconds, and waking another goroutine takes longer. But a long disk call must not keep the
// connection from reading. So each call has a number, and the watchdog looks at the numbers. If a
// reader is in the same call at two looks in a row, a new goroutine becomes the reader; the old one
// finishes its request and ends. When a disk has been stuck for a while, a reader passes its role
// on before each request for that disk, so that many such requests delay a connection no longer
// than a few. The fast case costs three atomic operations per call, and no goroutine, queue or
// wake-up.

// stallTick is the time between two looks. A call delays its connection for at most two ticks. A
// reader that only waits for a processor looks stalled, too. So a tick is longer than one or two
// time slices.
const stallTick = 10 * time.Millisecond

// stuckTicks is for how many looks a disk must have a stalled call, before readers pass on their
// role for its requests. On a busy machine, readers look stalled for fewer looks than that.
const stuckTicks = 4

// A disk that is slow but not stalled, such as a hard disk, would get one request at a time. So
// after a call that took slowCall, the next slowCalls requests for the disk are passed on, up to
// slowParallel at once.
const (
	slowCall     = 500 * time.Microsecond
	slowCalls    = 16
	slowParallel = 16
)

// maxInCalls is how many goroutines without the role may be in disk calls that do not return. Each
// holds a thread: Go ends a process that has 10,000 of them, and a container often may have only
// 4,096. Beyond that, a connection waits for its call.
const maxInCalls = 3 << 10

// quietTicks is the number of looks without a call after which the watchdog ends.
const quietTicks = 200

// watchdog passes on the role of stalled readers. It runs while there are calls.
type watchdog struct {
	awake atomic.Bool
	calls atomic.Uint32 // not 0: there were calls since the last look
	// inCalls is how many goroutines are in a call of a stuck disk without the role
	inCalls atomic.Int32

	mu      sync.Mutex
	readers map[*Reader]struct{} // guarded by mu
}

// stall is the watchdog's state of a disk.
type stall struct {
	stalled atomic.Int32 // current calls in which a reader lost its role
	stuck   atomic.Bool  // there were such calls for stuckTicks looks
	// looks in a row with such a call; only the watchdog uses it
	ticks int

	armed  atomic.Int32 // how many of the next requests are passed on, because the disk was slow
	passed atomic.Int32 // how many requests that were passed on for that reason are under way
}

// Reader is the role of reading the requests of one connection.
type Reader struct {
	disks  *Disks
	conn   *Conn
	loop   func(*Turn)
	handOn func()
	late   bool // it executes the requests of a Late

	// busy is the number of the current disk call of the goroutine with the role, or 0.
	busy  atomic.Uint64
	calls uint64 // number of calls so far; only the goroutine with the role uses it
	// turn is the goroutine with the role. It is valid while busy is not 0.
	turn    *Turn
	watched uint64 // only the watchdog uses it
}

// Turn is a goroutine that has or had the role of a Reader. After it has lost the role, it only
// finishes its current request.
type Turn struct {
	Reading bool // it has the role; only this goroutine may read the field
	Late    bool // the role is a Late's: its requests may wait for storage

	reader *Reader
	call   uint64      // number of its disk call as the reader; 0: none
	disk   *Disk       // the disk of that call, and of the request over which the role was lost
	passed *Disk       // the slow disk for which its request was passed on
	inCall bool        // it is counted in watchdog.inCalls
	lost   atomic.Bool // it has lost the role over the request in hand
	wait   wait        // it is in a disk call without the role
}

// StackCharge is how many bytes a goroutine that hangs in a disk counts for in the limit of memory.
const StackCharge = 16 << 10

// NewReader makes the role for one connection; the caller then calls Run, and Close. loop reads and
// executes requests until its turn is no longer Reading, or the connection has ended. handOn is
// called before another goroutine takes over; it must not wait.
func (s *Disks) NewReader(c *Conn, loop func(*Turn), handOn func()) *Reader {
	r := &Reader{disks: s, conn: c, loop: loop, handOn: handOn}
	s.watch.mu.Lock()
	defer s.watch.mu.Unlock()
	if s.watch.readers == nil {
		s.watch.readers = make(map[*Reader]struct{})
	}
	s.watch.readers[r] = struct{}{}
	return r
}

// Run reads on the calling goroutine. It returns when this goroutine has lost the role, or the
// connection has ended.
func (r *Reader) Run() {
	t := &Turn{reader: r, Reading: true, Late: r.late}
	r.turn = t
	r.loop(t)
	if t.lost.Load() {
		t.returned()
		r.disks.Memory.Charge(-StackCharge)
		if t.inCall {
			r.disks.watch.inCalls.Add(-1)
		}
	}
	if t.passed != nil {
		t.passed.stall.passed.Add(-1)
	}
}

// takeOver starts another goroutine that reads. The former one finishes its request.
func (r *Reader) takeOver(lost *Turn) {
	lost.lost.Store(true)
	if lost.disk != nil {
		lost.wait.begin(lost.disk, lost.Client(), false)
	}
	r.disks.Memory.Charge(StackCharge) // until the former goroutine has ended
	r.conn.Add()
	r.handOn()
	go func() {
		defer r.conn.Done()
		r.Run()
	}()
}

// Close ends the role. Nothing is read any more.
func (r *Reader) Close() {
	r.disks.watch.mu.Lock()
	defer r.disks.watch.mu.Unlock()
	delete(r.disks.watch.readers, r)
}

// Busy reports whether the reader is in a disk call.
func (r *Reader) Busy() bool { return r.busy.Load() != 0 }

// WithoutRole returns a turn that never has the role, for a request of the connection that another
// goroutine executes.
func (r *Reader) WithoutRole() *Turn { return &Turn{reader: r} }

// Client is the client whose requests the goroutine executes, or nil.
func (t *Turn) Client() *Client {
	if t.reader == nil {
		return nil
	}
	return t.reader.conn.client.Load()
}

// Enter marks the beginning of a disk call.
func (t *Turn) Enter(d *Disk) {
	if !t.Reading {
		if t.wait.disk == nil {
			t.wait.begin(d, t.Client(), false)
		}
		return
	}
	t.disk = d
	if d.stall.stuck.Load() && t.PassOnCall() {
		return
	}
	if d.stall.armed.Load() > 0 && t.Share(d) {
		d.stall.armed.Add(-1)
		return
	}
	r := t.reader
	r.calls++
	t.call = r.calls
	r.busy.Store(t.call)
	if w := &r.disks.watch; w.calls.Load() == 0 {
		w.calls.Store(1)
		if !w.awake.Load() && w.awake.CompareAndSwap(false, true) {
			go r.disks.runWatchdog()
		}
	}
}

func (t *Turn) countCall() {
	t.inCall = true
	t.reader.disks.watch.inCalls.Add(1)
}

// Leave marks the end of a disk call. Afterwards Reading says whether the goroutine still has the
// role.
func (t *Turn) Leave() {
	if t.call == 0 {
		t.returned()
		return
	}
	if !t.reader.busy.CompareAndSwap(t.call, 0) {
		t.Reading = false
		// The watchdog holds the lock while it notes that this goroutine waits.
		t.reader.disks.watch.mu.Lock()
		//lint:ignore SA2001 it only waits for the watchdog
		t.reader.disks.watch.mu.Unlock()
		t.returned()
		if t.disk.stall.stalled.Add(-1) == 0 {
			t.disk.stall.stuck.Store(false)
		}
	}
	t.call = 0
}

// returned notes that a disk call without the role has ended.
func (t *Turn) returned() {
	if t.wait.disk != nil {
		t.wait.end(true)
	}
}

// OutsideCall runs f, which may wait for the peer. If the goroutine is in a disk call, that call
// does not count meanwhile: the disk is not the reason for the wait.
func (t *Turn) OutsideCall(f func() error) error {
	d := t.disk
	if t.call == 0 {
		d = t.wait.disk // of a call without the role, if it is in one
	}
	t.Leave()
	err := f()
	if d != nil {
		t.Enter(d)
	}
	return err
}

// Took notes how long a read or write was in the disk. It ignores a request that has waited for far
// content. Do not call it for a postponed request, which has waited for the requests before it.
func (t *Turn) Took(r *Request, d *Disk, took time.Duration) {
	if took > slowCall && !r.Waited() {
		d.stall.armed.Store(slowCalls)
	}
}

// Share passes the role on because the request will use a processor for long, unless slowParallel
// requests of the disk do so already. It reports whether it did.
func (t *Turn) Share(d *Disk) bool {
	t.disk = d
	if d.stall.passed.Add(1) > slowParallel || t.Reading && !t.PassOnCall() {
		d.stall.passed.Add(-1)
		return false
	}
	t.passed = d
	return true
}

// Shared is how many requests to the disk other goroutines execute because of Share.
func (d *Disk) Shared() int { return int(d.stall.passed.Load()) }

// Stalled is in how many calls of the disk a reader has lost its role to the watchdog.
func (d *Disk) Stalled() int { return int(d.stall.stalled.Load()) }

// PassOn gives up the role, if the goroutine still has it, because its request is about to wait,
// for example for far content.
func (t *Turn) PassOn() {
	t.Leave()
	switch {
	case t.Reading:
		t.Reading = false
		t.reader.takeOver(t)
	case t.disk != nil && t.wait.disk == nil: // the watchdog was faster, and the call goes on
		t.wait.begin(t.disk, t.Client(), false)
	}
}

// PassOnCall is PassOn for a request in a call of local storage, which takes a thread. If there are
// too many such threads, it does nothing and returns false.
func (t *Turn) PassOnCall() bool {
	if t.reader.disks.watch.inCalls.Load() >= maxInCalls {
		return false
	}
	t.Leave()
	if t.Reading { // otherwise the watchdog was faster, and has counted it
		t.countCall()
	}
	t.PassOn()
	return true
}

// Lost reports whether the goroutine has lost the role because its request took too long in the
// disk. Any goroutine may call it.
func (t *Turn) Lost() bool { return t.lost.Load() }

// runWatchdog looks at all readers every stallTick, until there are none, or there have been no
// calls for a while.
func (s *Disks) runWatchdog() {
	tick := time.NewTicker(stallTick)
	defer tick.Stop()
	for quiet, readers := 0, 1; readers > 0 && quiet < quietTicks; quiet++ {
		<-tick.C
		if s.watch.calls.Swap(0) != 0 {
			quiet = 0
		}
		var busy bool
		if readers, busy = s.lookForStalls(); busy {
			quiet = 0
		}
	}
	s.watch.awake.Store(false)
	if s.watch.calls.Load() != 0 && s.watch.awake.CompareAndSwap(false, true) {
		go s.runWatchdog() // a call has begun just now, and its reader still saw a watchdog
	}
}

// lookForStalls passes on the role of every reader that is in the same call as at the last look. It
// returns how many readers there are, and whether to look again.
func (s *Disks) lookForStalls() (readers int, busy bool) {
	s.watch.mu.Lock()
	readers = len(s.watch.readers)
	for r := range s.watch.readers {
		call := r.busy.Load()
		if call != 0 {
			busy = true
			if call == r.watched && s.watch.inCalls.Load() < maxInCalls &&
				r.busy.CompareAndSwap(call, 0) {
				r.turn.disk.stall.stalled.Add(1)
				r.turn.countCall()
				r.takeOver(r.turn)
			}
		}
		r.watched = call
	}
	s.watch.mu.Unlock()
	for _, d := range s.All() {
		busy = d.stall.age() || busy
	}
	return readers, busy
}

// age counts how long a disk has had stalled calls, and reports whether it has one.
func (w *stall) age() (stalled bool) {
	if w.stalled.Load() <= 0 {
		w.ticks = 0
		w.stuck.Store(false)
		return false
	}
	if w.ticks++; w.ticks >= stuckTicks {
		w.stuck.Store(true)
	}
	return true
}
