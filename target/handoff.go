package target

import (
	"cmp"
	"time"

	"kubevirt.io/disk/serving"
)

// A session's reader executes commands itself: see serving.Reader.

// shareAfter is how long a reader decompresses for its received commands before others help.
// Another thread must be woken, finds nothing in its processor's caches, and answers with its own
// system call. For shorter work, on two processors, that was slower than to go on alone.
const shareAfter = time.Millisecond

// fewLate is how many reads that wait for storage are the reader's. More of them are enough for two
// goroutines.
const fewLate = 4

// enter marks the beginning of a disk call of the reader. It does nothing for other goroutines.
func (c *conn) enter(run *runner, t *task) {
	d := t.scsi.Disk()
	if d == nil || !run.late && run.Reading && c.shares(t, d) && run.Share(d) {
		return
	}
	run.Enter(d)
}

// handOn prepares for a new reader instead of one that finishes its command and ends.
func (c *conn) handOn() { c.slowSince = 0 }

// shares reports whether to pass on a command that keeps a processor busy for long: if it keeps
// others waiting and the reader has been busy for shareAfter. A lone command is not worth a
// wake-up.
func (c *conn) shares(t *task, d *serving.Disk) bool {
	if c.rx.Buffered() == 0 && d.Shared() == 0 || !t.scsi.Slow() {
		return false
	}
	now := time.Since(c.srv.start)
	c.slowSince = cmp.Or(c.slowSince, now)
	return now-c.slowSince >= shareAfter
}

// Waits implements serving.Executor. While the command waits for far content, another goroutine
// reads. If memory is scarce, a read that would hold much of it must go on in smaller steps.
func (r *runner) Waits() (timeout time.Duration, err error) {
	if r.buf != nil && len(r.buf.B) > heldChunk && r.conn.srv.pool.Scarce() {
		return 0, errSmallerSteps
	}
	r.PassOn()
	return r.conn.session().nexus.HoldTimeout(), nil
}

// Blocks implements serving.Executor: the session goes on while the command waits for storage. A
// goroutine for each read would cost more than the read.
func (r *runner) Blocks() error {
	switch {
	case r.late: // first send the answers of the reads before this one
		r.conn.late.Waits(r.Turn)
		if err := r.OutsideCall(r.conn.tx.Flush); err != nil {
			r.conn.fail(err)
			return serving.ErrAborted
		}
		return nil
	case r.Reading && r.single:
		return serving.ErrLater
	}
	r.PassOnCall()
	return nil
}

// Blocked implements serving.Executor.
func (r *runner) Blocked(took time.Duration) {
	if r.late {
		r.conn.late.Blocked(r.Turn, took)
	}
}

// postpone leaves a read to the reader of those that wait for storage.
func (c *conn) postpone(turn *serving.Turn, t *task) {
	s := t.sess
	s.mu.Lock()
	t.owner = nil
	s.mu.Unlock()
	c.late.Postpone(turn, t)
	if c.Cause() != nil { // a goroutine that has lost the role may come after the end
		c.dropLate()
	}
}

// dropLate ends the postponed reads of a connection that has ended.
func (c *conn) dropLate() {
	for _, t := range c.late.Left() {
		c.abandon(t)
	}
}

// lateLoop executes reads that wait for storage.
func (c *conn) lateLoop(turn *serving.Turn) {
	run := &runner{Turn: turn, conn: c}
	defer c.recoverRunner(run)
	for run.Reading {
		t, ok := c.late.Next()
		if !ok {
			break
		}
		if err := c.executeLate(run, t); err != nil {
			c.fail(err)
		}
	}
	if err := c.tx.Flush(); err != nil { // also what a turn has queued that hangs in its next read
		c.fail(err)
	}
}

// executeLate executes a read that was left for later.
func (c *conn) executeLate(run *runner, t *task) (err error) {
	if run.take(t) {
		run.late = true
		err = c.runRead(run, t)
		run.late = false
	}
	return err
}

// take makes a postponed read the runner's, unless it was aborted meanwhile.
func (r *runner) take(t *task) bool {
	s := t.sess
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.state == taskAborted {
		s.dropLocked(t)
		return false
	}
	t.owner, r.task, t.scsi.Executor = r, t, r
	return true
}
