package target

import (
	"time"

	"kubevirt.io/disk/serving"
)

// A session's reader executes commands itself: see serving.Reader.

// shareAfter is how long a reader decompresses for its received commands before others help.
// Another thread must be woken, finds nothing in its processor's caches, and answers with its own
// system call. For shorter work, on two processors, that was slower than to go on alone.
const shareAfter = time.Millisecond

// enter marks the begin of a disk call of the reader. It does nothing for other goroutines.
func (c *conn) enter(run *runner, t *task) {
	d := t.scsi.Disk()
	if d == nil || run.Reading && c.shares(t, d) && run.Share(d) {
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
	if c.slowSince == 0 {
		c.slowSince = now
	}
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

// Blocks implements serving.Executor: another goroutine reads while the command waits for storage.
func (r *runner) Blocks() error {
	r.PassOn()
	return nil
}
