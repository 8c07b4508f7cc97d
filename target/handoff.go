package target

import (
	"cmp"
	"time"

	"kubevirt.io/disk/serving"
)

// A session's reader executes commands itself: see serving.Reader.

// shareAfter is how long a reader decompresses for commands before it passes some to other
// goroutines. Another thread must be woken, has nothing in its processor's caches, and answers with
// its own system call. For shorter work, on two processors, that was slower than one thread.
const shareAfter = time.Millisecond

// fewLate is how many reads that wait for storage the reader executes itself. More of them are
// worth another goroutine.
const fewLate = 4

// enter marks the beginning of a disk call of the reader. It does nothing for other goroutines.
func (c *conn) enter(run *runner, t *task) {
	d := t.scsi.Disk()
	if d == nil || !run.late && run.Reading && c.shares(t, d) && run.Share(d) {
		return
	}
	run.Enter(d)
}

// handOn prepares for a new reader. The former one finishes its command and ends.
func (c *conn) handOn() { c.slowSince = 0 }

// shares reports whether to pass on a command that keeps a processor busy for long: only if other
// commands wait and the reader has been busy for shareAfter. A single command is not worth a
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

// Blocks implements serving.Executor: a read that waits for storage is postponed, and the session
// goes on. A goroutine for each such read would cost more than the read.
func (r *runner) Blocks() error {
	switch {
	case r.late: // send the answers of the reads before this one
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

// postpone leaves a read to serving.Late.
func (c *conn) postpone(turn *serving.Turn, t *task) {
	s := t.sess
	s.mu.Lock()
	t.owner = nil
	s.mu.Unlock()
	c.late.Postpone(turn, t)
	if c.Cause() != nil { // a goroutine without the role may come here after the end
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
	if err := c.tx.Flush(); err != nil { // also answers of a turn that hangs in its next read
		c.fail(err)
	}
}

// executeLate executes a postponed read.
func (c *conn) executeLate(run *runner, t *task) (err error) {
	if run.take(t) {
		run.late = true
		err = c.runRead(run, t)
		run.late = false
	}
	return err
}

// take makes run the owner of a postponed read, unless the read was aborted meanwhile.
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
