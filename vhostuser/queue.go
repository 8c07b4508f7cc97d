package vhostuser

import (
	"fmt"
	"math"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/serving"
)

const (
	// stopTimeout is how long all rings that are stopped together wait for far content. QEMU, and
	// the person at its monitor, wait meanwhile.
	stopTimeout = 30 * time.Second
)

// queue executes the requests of one ring. A goroutine has the role of the reader: it takes
// requests and executes them. When one of them takes long, another goroutine gets the role
// (serving.Reader). The message loop of the connection starts and stops the queue. Nothing else
// changes what the front end has set.
type queue struct {
	c     *conn
	index int

	mu    sync.Mutex
	ring  ring    // guarded by mu while the queue runs
	table *table  // guarded by mu; nil: the guest has no memory yet
	call  *caller // guarded by mu; notifies the driver; nil: nothing does
	// guarded by mu; former ones that a goroutine may still use
	formerCalls []*caller
	mustTell    bool // guarded by mu; call is new: tell the driver even if it wants no interrupt
	// guarded by mu; requests of an earlier connection, or left when the ring stopped. They come
	// before those of the ring
	resumed  []uint16
	inflight *inflight // guarded by mu while the queue runs

	free []*request // guarded by mu
	late *serving.Late[*request]

	out    int  // guarded by mu; requests that were taken and have not ended
	asleep int  // guarded by mu; of these, requests that have waited for something
	full   bool // guarded by mu; no request is taken until one has ended

	kick     int  // the eventfd of the driver's kicks; -1: none
	fromZero bool // the ring begins at 0: the device was reset
	// the device was reset since the ring ran, or the ring goes on at another place. The driver may
	// still be the same: front ends also reset to stop a guest that goes on later
	wasReset bool
	enabled  bool
	running  bool // only while it is enabled
	role     *serving.Reader
	active   sync.WaitGroup // goroutines that execute its requests
	stop     atomic.Bool
	gaveUp   bool // guarded by conn.mu; it stops, and does not wait for far content any more
	sleeper  sleeper
}

// start begins to execute requests, if the front end has said all that is needed.
func (q *queue) start() error {
	if q.running || !q.enabled || q.kick < 0 {
		return nil
	}
	if err := q.ring.locate(q.table); err != nil {
		return err
	}
	if err := q.begin(); err != nil {
		return err
	}
	if err := q.sleeper.open(q); err != nil {
		return err
	}
	if !rings.add(1) {
		return fmt.Errorf("%d rings run in this process already: give guests fewer queues",
			maxRings)
	}
	q.c.letWait(q)
	q.running = true
	q.c.running.Add(1)
	c, handOn := &q.c.Conn, func() { q.active.Add(1) }
	disks := q.c.srv.disks
	q.role = disks.NewReader(c, q.loop, handOn)
	q.late = serving.NewLate[*request](disks, c, math.MaxInt, q.loop, handOn)
	q.active.Add(1)
	go q.role.Run()
	return nil
}

const (
	// fewRequests is how many requests of a ring may always be taken.
	fewRequests = 16
	// maxBlocked is how many goroutines of a connection may be in disk calls, each with a thread: a
	// disk may hang, and its guest has rings of many thousand requests.
	maxBlocked = 256
	// longChain is the number of segments from which a request's memory is not kept for later ones.
	longChain = 256
)

// crowded reports whether a request must end before another one is taken.
func (q *queue) crowded() bool {
	if q.out < fewRequests {
		return false
	}
	return q.out-q.asleep >= max(fewRequests, maxBlocked/int(max(q.c.running.Load(), 1))) ||
		q.c.share.Exhausted()
}

// noteWaiting notes that a request waits, but not in a disk call. It counts for the limit of memory
// until it ends.
func (q *queue) noteWaiting(req *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if req.cost == 0 {
		req.cost = memory.RequestCost + int64(unsafe.Sizeof(segment{}))*req.chain.room()
		q.c.share.Charge(req.cost)
		q.asleep++
	}
}

// begin finds out at which position the ring goes on.
func (q *queue) begin() error {
	r := &q.ring
	clear(r.taken)
	if q.fromZero {
		r.next, q.fromZero = 0, false
	}
	r.flags = 0
	r.usedNext = load16(r.used, 2)
	r.lastNotify = r.usedNext
	r.eventIdx = q.c.features&featureEventIdx != 0
	q.inflight = q.c.region.ringPart(q.index, r.num)
	if q.wasReset && r.next == 0 && r.usedNext == 0 { // another driver, or the same again
		q.inflight.clear()
		q.c.setWriteThrough(throughMaybe, false)
	}
	q.wasReset = false
	heads, err := q.inflight.resume(r.usedNext)
	if err != nil {
		return err
	}
	for _, head := range heads {
		if err := r.markTaken(head); err != nil {
			return err
		}
	}
	if q.inflight != nil {
		r.next = r.usedNext + uint16(len(heads))
	}
	q.resumed = heads
	if r.next != 0 && !q.c.known {
		q.c.setWriteThrough(throughMaybe, true)
	}
	return nil
}

// leave keeps a request that was given up because its ring stops: see ring.rewind. It returns false
// if the request was given up for another reason.
func (q *queue) leave(run *run) bool {
	if !q.c.hasLeft(run) {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.resumed = append(q.resumed, run.req.chain.head)
	q.sleeper.wakeUp() // if the client was fenced, the ring runs, and refuses the request
	return true
}

// halt stops taking requests, and returns when the taken ones have ended. If they wait for far
// content, they are given up: at once if the connection has ended, otherwise after stopTimeout. See
// leave. Afterwards the queue does not touch the guest's memory.
func (q *queue) halt() {
	if !q.running {
		return
	}
	q.stop.Store(true)
	q.role.Close() // first: the watchdog starts no goroutine any more
	q.late.Close()
	q.sleeper.wakeUp()
	begun := time.Now()
	late := time.AfterFunc(q.c.stopTime, func() { q.c.giveUp(q) })
	defer late.Stop()
	ended := make(chan struct{})
	go func() {
		q.active.Wait()
		close(ended)
	}()
	for done := false; !done; {
		select {
		case <-ended:
			done = true
		case <-time.After(100 * time.Millisecond):
			q.drain()
		}
	}
	q.c.stopTime = max(0, q.c.stopTime-time.Since(begun))
	q.running = false
	q.c.running.Add(-1)
	rings.add(-1)
	for _, req := range q.late.Left() { // these stay in flight
		q.recycle(req)
	}
	q.sleeper.close()
	if q.c.Cause() == nil {
		q.ring.rewind(q.resumed, &q.c.dirty)
		q.resumed = nil
	}
}

// forgetKick makes the ring wait for a new eventfd before it runs again.
func (q *queue) forgetKick() {
	closeFD(q.kick)
	q.kick = -1
}

// drain ends the waits of goroutines for a front end that does not read the eventfds of calls.
func (q *queue) drain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.call.drain()
	for _, former := range q.formerCalls {
		former.drain()
	}
}

// remap gives a queue another memory table. Requests under way keep the former one. After an error
// the queue keeps it, too.
func (q *queue) remap(t *table) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.running {
		if err := q.ring.locate(t); err != nil {
			return err
		}
	}
	if t != nil {
		t.refs.Add(1)
	}
	q.table.release()
	q.table = t
	return nil
}

// address sets the addresses of the ring, which may run.
func (q *queue) address(desc, used, avail, log uint64, logged bool) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	r := &q.ring
	r.descUser, r.usedUser, r.availUser, r.usedGuest, r.logged = desc, used, avail, log, logged
	if !q.running {
		return nil
	}
	return r.locate(q.table)
}

// loop is the loop of a goroutine with the role.
func (q *queue) loop(turn *serving.Turn) {
	defer q.active.Done()
	run := &run{Turn: turn, q: q}
	run.r.Executor = run
	err := run.work()
	if err != nil {
		q.c.fail(err)
	}
}

// work takes and executes requests until the queue stops or another goroutine has the role.
func (run *run) work() (err error) {
	debug.SetPanicOnFault(true)
	defer func() {
		if p := recover(); p != nil {
			run.Leave()
			err = run.q.c.panicked(p)
		}
	}()
	run.q.tellDriver() // of requests that the former reader has put
	for {
		var ok bool
		if run.Late {
			if run.q.late.Waiting() == 0 { // before: a new request starts the next goroutine
				run.q.tellDriver()
			}
			run.req, ok = run.q.late.Next()
			run.begun = time.Since(run.q.c.since)
		} else {
			ok, err = run.q.next(run)
		}
		if err != nil || !ok {
			return err
		}
		run.serve()
		if !run.Reading {
			return nil
		}
	}
}

// next takes the next request. It returns false if the queue stops.
func (q *queue) next(run *run) (ok bool, err error) {
	for looked := false; ; {
		if q.stop.Load() || q.c.Cause() != nil {
			q.tellDriver()
			q.late.Start()
			return false, nil
		}
		if run.taken++; run.taken%turnLength == 0 {
			q.yield()
		}
		req, err := q.take()
		if err != nil {
			return false, err
		}
		if req != nil {
			if run.ahead++; run.ahead >= turnLength { // the guest may never let the ring be empty
				run.ahead = 0
				q.late.Start()
			}
			run.req, run.begun, run.busy = req, req.arrived, true
			return true, nil
		}
		run.ahead = 0
		if req, ok := q.late.Take(); ok {
			run.req, run.begun, run.busy = req, time.Since(q.c.since), true
			return true, nil
		}
		q.tellDriver()
		if !looked && run.busy {
			looked = true
			if q.look() {
				continue
			}
		}
		if !q.sleep() {
			continue
		}
		run.busy, looked = false, true
		if q.stop.Load() {
			return false, nil
		}
		q.disableKicks()
	}
}

// take takes the next request of the ring; nil: there is none.
func (q *queue) take() (req *request, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.full = q.crowded(); q.full {
		return nil, nil
	}
	var head uint16
	if len(q.resumed) > 0 {
		head = q.resumed[0]
		q.resumed = q.resumed[1:]
	} else {
		var ok bool
		if head, ok, err = q.ring.take(); !ok || err != nil {
			return nil, err
		}
		q.inflight.noteTaken(head)
	}
	if n := len(q.free); n > 0 {
		req, q.free = q.free[n-1], q.free[:n-1]
	} else {
		req = &request{}
	}
	if err := q.ring.read(head, q.table, &req.chain); err != nil {
		return nil, err
	}
	if err := req.parse(); err != nil {
		return nil, err
	}
	q.table.refs.Add(1)
	req.table, req.arrived = q.table, time.Since(q.c.since)
	q.out++
	return req, nil
}

// recycle keeps the memory of a request that has ended for later ones.
func (q *queue) recycle(req *request) {
	req.table.release()
	req.table = nil
	q.mu.Lock()
	defer q.mu.Unlock()
	q.out--
	if req.cost != 0 {
		q.asleep--
		q.c.share.Charge(-req.cost)
		req.cost = 0
	}
	if q.full {
		q.full = false
		q.sleeper.wakeUp()
	}
	if req.chain.room() <= longChain {
		q.free = append(q.free, req)
	}
}

func (q *queue) waiting() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ring.waiting()
}

// enableKicks asks the driver for a kick. It returns false if there is something to do already.
func (q *queue) enableKicks() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !q.mustTell && (q.full || len(q.resumed) == 0 && q.ring.enableKicks())
}

func (q *queue) disableKicks() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ring.disableKicks()
}

// maxUntold is how many requests are done before the driver is notified, while there are more to
// do. An interrupt for each would cost more than the requests, in the guest and here.
const maxUntold = 16

// put gives a request back to the driver. A reader notifies the driver of several at once.
func (q *queue) put(head uint16, written uint32, reader bool) {
	if q.show(head, written, reader) {
		q.tellDriver()
	}
}

// show is put, but returns whether the driver is to be notified now, and does not notify it.
func (q *queue) show(head uint16, written uint32, reader bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock() // the guest's memory can fault
	q.inflight.notePutting(head)
	q.ring.put(head, written, &q.c.dirty)
	q.inflight.notePut(head, q.ring.usedNext)
	return !reader || q.ring.usedNext-q.ring.lastNotify >= maxUntold
}

// enable starts or stops serving a ring. After it stops, Cloud Hypervisor saves the guest's memory.
func (q *queue) enable(on bool) error {
	q.enabled = on
	if !on {
		return q.c.pause(q)
	}
	return q.start()
}

// close ends the queue.
func (q *queue) close() {
	q.halt()
	q.sleeper.close()
	q.setCall(nil)
	q.forgetKick()
	q.table.release()
}
