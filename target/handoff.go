package target

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// A reader executes disk calls itself. Nearly all of them are answered by the page cache in microseconds;
// one that is not must not keep the connection from reading, answering pings, or taking ABORT TASK. So each
// call is numbered, and the watchdog looks at the numbers: a reader that is in the same call at two looks
// in a row loses the reading role to a new goroutine. The one that was stuck finishes its command and ends.
// When a LUN has been stuck for a while, whoever reads a command for it passes the role on at once, so that many
// such commands hold a connection up no longer than a few. This costs the fast case three atomic operations per
// call, and no goroutine, queue or wake-up.

// stallTick is the time between two looks; a call holds its connection up for at most two of them. A reader that
// merely waits for a processor looks stalled, too, so it is longer than a time slice or two.
const stallTick = 10 * time.Millisecond

// stuckTicks is how many looks a LUN must have had a stalled call before commands for it are not even tried by a
// reader. A machine that is short of processors lets readers look stalled for shorter than that.
const stuckTicks = 4

// hungTicks is how many looks a LUN must have had a stalled call before the log tells of it: 10 s, well before guests give their commands
// up. On a disk that is merely slow those calls end, and as others are passed on meanwhile, there is none for a look then.
const hungTicks = int(10 * time.Second / stallTick)

// A disk that is slow but not stalled, as one whose data has to come from a drive, would be given one command at a
// time. So a call that took slowCall has the next slowCommands commands for its LUN passed on, up to slowParallel at once.
const (
	slowCall     = 500 * time.Microsecond
	slowCommands = 16
	slowParallel = 16
)

// shareAfter is how long a reader decompresses for commands that it has received, one after the other, before it has others help. Another
// thread has to be woken, finds nothing in its processor's caches, and answers with a system call of its own: below this, that was slower
// on two processors than to go on alone.
const shareAfter = time.Millisecond

// quietTicks is how many looks without any call in progress put the watchdog to sleep.
const quietTicks = 200

// stackCharge is what a goroutine that hangs in a disk counts for in the limit of memory, bytes.
const stackCharge = 16 << 10

// watchdog hands on the reading role of stalled readers.
type watchdog struct {
	asleep atomic.Bool
	wake   chan struct{}
	calls  atomic.Uint32 // not 0: there was a call since the last look

	luns atomic.Pointer[[]*lunWatch] // never nil; replaced under Server.mu
	none lunWatch                    // for commands to a LUN that does not exist
}

// lunWatch is what the watchdog knows of a LUN.
type lunWatch struct {
	number  uint16
	stalled atomic.Int32 // calls in progress in which a reader lost its role
	stuck   atomic.Bool  // there has been one for stuckTicks
	ticks   int          // looks at which there was one, since there was none; belongs to the watchdog

	armed  atomic.Int32 // so many more commands are passed on, as the disk was slow a moment ago
	passed atomic.Int32 // commands in progress that were passed on for that reason
}

// of is what the watchdog knows of the LUN that a command is for.
func (w *watchdog) of(t *task) *lunWatch {
	if l, ok := t.scsi.Host().(*lunWatch); ok {
		return l
	}
	return &w.none
}

// enter marks that the reader begins a disk call. It does nothing for a goroutine that is no longer the reader.
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

// leave marks the end of a disk call. Afterwards run.reading says whether the goroutine still is the reader.
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

// runWatchdog looks at all sessions every stallTick while there are disk calls, and sleeps otherwise.
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
			// A call began while we dozed off; its reader may or may not have seen us asleep.
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

// lookForStalls hands on the role of every reader that has been in one call since the last look, and says
// whether there is a reason to look again.
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

// age counts how long each LUN has had stalled calls, and says whether one has.
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
			s.log.Warn("the disk does not answer: what it or its image lies on hangs, and the guest's commands with it",
				zap.Uint16("lun", l.number), zap.Duration("since", time.Duration(l.ticks)*stallTick))
		}
	}
	return stalled
}

// handOn starts a new reader, in the place of one that finishes its command and ends.
func (c *conn) handOn() {
	c.slowSince = 0
	c.srv.pool.charge(stackCharge) // until the old one has ended
	c.srv.wg.Add(1)
	go func() {
		defer c.srv.wg.Done()
		c.readLoop()
	}()
}

// slow notes how long a READ or WRITE took in the disk.
func (l *lunWatch) slow(took time.Duration) {
	if took > slowCall {
		l.armed.Store(slowCommands)
	}
}

// pass takes a place among the commands that are passed on because their disk is slow, if there is one.
func (l *lunWatch) pass(run *runner) bool {
	if l.passed.Add(1) > slowParallel {
		l.passed.Add(-1)
		return false
	}
	l.armed.Add(-1)
	run.passed = l
	return true
}

// shares passes a command on that keeps a processor busy for long, when there are others that it would keep waiting, and have been kept
// waiting for shareAfter. A lone command is not worth a wake-up.
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

// Waits implements scsi.Executor: somebody else reads while the command waits for content that lies
// far away. A read that would hold much memory meanwhile, while that is scarce, has to go on in
// smaller steps.
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

// ended is called once for each goroutine that lost the reading role, when its command has ended.
func (c *conn) ended(run *runner) {
	c.srv.pool.charge(-stackCharge)
	if run.passed != nil {
		run.passed.passed.Add(-1)
	}
}
