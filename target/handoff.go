package target

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// A reader executes disk calls itself. The page cache answers nearly all of them in microseconds. A
// call that takes longer must not keep the connection from reading, answering pings, or handling
// ABORT TASK. So each call has a number, and the watchdog looks at the numbers. If a reader is in
// the same call at two looks in a row, a new goroutine becomes the reader; the old one finishes its
// command and ends. When a LUN has been stuck for a while, a reader passes its role on before each
// command for it, so that many such commands delay a connection no longer than a few. The fast case
// costs three atomic operations per call, and no goroutine, queue or wake-up.

// stallTick is the time between two looks. A call delays its connection for at most two ticks. A
// reader that only waits for a processor looks stalled, too, so a tick is longer than a time slice
// or two.
const stallTick = 10 * time.Millisecond

// stuckTicks is for how many looks a LUN must have a stalled call before readers no longer try
// commands for it. On a busy machine readers look stalled for a shorter time than that.
const stuckTicks = 4

// hungTicks is for how many looks a LUN must have a stalled call before the log reports it: 10 s,
// well before guests give up their commands. On a disk that is only slow, stalled calls end, and as
// others are passed on meanwhile, some look finds none.
const hungTicks = int(10 * time.Second / stallTick)

// A disk that is slow but not stalled, such as a drive, would get one command at a time. So after a
// call that took slowCall, the next slowCommands commands for its LUN are passed on, up to
// slowParallel at once.
const (
	slowCall     = 500 * time.Microsecond
	slowCommands = 16
	slowParallel = 16
)

// shareAfter is how long a reader decompresses for its received commands before others help.
// Another thread must be woken, finds nothing in its processor's caches, and answers with its own
// system call. For shorter work, on two processors, that was slower than to go on alone.
const shareAfter = time.Millisecond

// quietTicks is after how many looks without a call the watchdog sleeps.
const quietTicks = 200

// stackCharge is how many bytes a goroutine that hangs in a disk counts for in the limit of memory.
const stackCharge = 16 << 10

// watchdog passes on the reading role of stalled readers.
type watchdog struct {
	asleep atomic.Bool
	wake   chan struct{}
	calls  atomic.Uint32 // not 0: there were calls since the last look

	luns atomic.Pointer[[]*lunWatch] // never nil; replaced under Server.mu
	none lunWatch                    // for commands to a LUN that does not exist
}

// lunWatch is the watchdog's state of a LUN.
type lunWatch struct {
	number  uint16
	stalled atomic.Int32 // current calls in which a reader lost its role
	stuck   atomic.Bool  // there were such calls for stuckTicks looks
	// looks in a row with such a call; belongs to the watchdog
	ticks int

	armed  atomic.Int32 // this many more commands are passed on, because the disk was slow
	passed atomic.Int32 // current commands that were passed on for that
}

// of returns the state of a command's LUN.
func (w *watchdog) of(t *task) *lunWatch {
	if l, ok := t.scsi.Host().(*lunWatch); ok {
		return l
	}
	return &w.none
}

// enter marks the begin of a disk call of the reader. It does nothing for other goroutines.
func (c *conn) enter(run *runner, t *task) {
	if !run.reading {
		return
	}
	w := &c.srv.watch
	l := w.of(t)
	if l.stuck.Load() || l.armed.Load() > 0 && l.pass(run) || c.shares(run, t, l) {
		c.passOn(run)
		return
	}
	c.calls++
	run.call, run.lun = c.calls, l
	c.busy.Store(run.call)
	if w.calls.Load() == 0 {
		w.calls.Store(1)
		if w.asleep.Load() && w.asleep.CompareAndSwap(true, false) {
			w.wake <- struct{}{}
		}
	}
}

// leave marks the end of a disk call. Afterwards run.reading says whether the goroutine is still
// the reader.
func (c *conn) leave(run *runner) {
	if run.call == 0 {
		return
	}
	if !c.busy.CompareAndSwap(run.call, 0) {
		run.reading = false
		if run.lun.stalled.Add(-1) == 0 {
			run.lun.stuck.Store(false)
		}
	}
	run.call = 0
}

// runWatchdog looks at all sessions every stallTick while there are disk calls. Otherwise it
// sleeps.
func (s *Server) runWatchdog() {
	defer s.wg.Done()
	tick := time.NewTicker(stallTick)
	defer tick.Stop()
	for quiet := 0; ; quiet++ {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		if s.watch.calls.Swap(0) != 0 {
			quiet = 0
		}
		if s.lookForStalls() {
			quiet = 0
		}
		if quiet < quietTicks {
			continue
		}
		tick.Stop()
		s.watch.asleep.Store(true)
		if s.watch.calls.Load() != 0 && s.watch.asleep.CompareAndSwap(true, false) {
			// A call began while we fell asleep; its reader may or may not have seen that.
		} else {
			select {
			case <-s.ctx.Done():
				return
			case <-s.watch.wake:
			}
		}
		quiet = 0
		tick.Reset(stallTick)
	}
}

// lookForStalls passes on the role of every reader that is in the same call as at the last look. It
// reports whether to look again.
func (s *Server) lookForStalls() (busy bool) {
	s.mu.Lock()
	for c := range s.conns {
		call := c.busy.Load()
		if call != 0 {
			busy = true
			if call == c.watched && c.busy.CompareAndSwap(call, 0) {
				c.reader.lun.stalled.Add(1)
				c.reader.lost.Store(true)
				c.handOn()
			}
		}
		c.watched = call
	}
	s.mu.Unlock()
	return s.age() || busy
}

// age counts how long each LUN has had stalled calls, and reports whether any has one.
func (s *Server) age() (stalled bool) {
	for _, l := range *s.watch.luns.Load() {
		if l.stalled.Load() <= 0 {
			if l.ticks >= hungTicks {
				s.log.Info("the disk answers again", zap.Uint16("lun", l.number),
					zap.Duration("after", time.Duration(l.ticks)*stallTick))
			}
			l.ticks = 0
			l.stuck.Store(false)
			continue
		}
		stalled = true
		if l.ticks++; l.ticks >= stuckTicks {
			l.stuck.Store(true)
		}
		if l.ticks == hungTicks {
			s.log.Warn("the disk does not answer: what it or its image lies on hangs, and the "+
				"guest's commands with it",
				zap.Uint16("lun", l.number),
				zap.Duration("since", time.Duration(l.ticks)*stallTick))
		}
	}
	return stalled
}

// handOn starts a new reader instead of one that finishes its command and ends.
func (c *conn) handOn() {
	c.slowSince = 0
	c.srv.pool.charge(stackCharge) // until the old one has ended
	c.srv.wg.Add(1)
	go func() {
		defer c.srv.wg.Done()
		c.readLoop()
	}()
}

// slow notes the time that a READ or WRITE took in the disk.
func (l *lunWatch) slow(took time.Duration) {
	if took > slowCall {
		l.armed.Store(slowCommands)
	}
}

// pass takes a place among the commands that are passed on because their disk is slow, and reports
// whether there was one.
func (l *lunWatch) pass(run *runner) bool {
	if l.passed.Add(1) > slowParallel {
		l.passed.Add(-1)
		return false
	}
	l.armed.Add(-1)
	run.passed = l
	return true
}

// shares passes on a command that keeps a processor busy for long, if it keeps others waiting and
// the reader has been busy for shareAfter. A lone command is not worth a wake-up.
func (c *conn) shares(run *runner, t *task, l *lunWatch) bool {
	if c.rx.r == c.rx.w && l.passed.Load() == 0 || !t.scsi.Slow() {
		return false
	}
	now := time.Since(c.srv.start)
	if c.slowSince == 0 {
		c.slowSince = now
	}
	if now-c.slowSince < shareAfter {
		return false
	}
	if l.passed.Add(1) > slowParallel {
		l.passed.Add(-1)
		return false
	}
	run.passed = l
	return true
}

// Waits implements serving.Executor. While the command waits for far content, another goroutine
// reads. If memory is scarce, a read that would hold much of it must go on in smaller steps.
func (r *runner) Waits() (patience time.Duration, err error) {
	if r.buf != nil && len(r.buf.b) > heldChunk && r.conn.srv.pool.scarce() {
		return 0, errSmallerSteps
	}
	if r.reading {
		r.conn.leave(r)
	}
	if r.reading {
		r.conn.passOn(r)
	}
	return r.conn.session().patience(), nil
}

// passOn gives the reading role up.
func (c *conn) passOn(run *runner) {
	run.reading = false
	run.lost.Store(true)
	c.handOn()
}

// ended is called once for each goroutine that has lost the reading role, when its command has
// ended.
func (c *conn) ended(run *runner) {
	c.srv.pool.charge(-stackCharge)
	if run.passed != nil {
		run.passed.passed.Add(-1)
	}
}
