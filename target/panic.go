package target

import (
	"runtime/debug"

	"go.uber.org/zap"
)

// A bug ends one session and nothing else. Every goroutine that handles input of a peer, or sends
// to a peer, recovers from panics. It gives back all that it held, so a thousand panics cost no
// more than one.

// recoverPanic is deferred by goroutines of a connection that hold nothing.
func (c *conn) recoverPanic() {
	if p := recover(); p != nil {
		c.panicked(p)
	}
}

// recoverRunner is deferred by goroutines that execute commands.
func (c *conn) recoverRunner(run *runner) {
	p := recover()
	if p == nil {
		return
	}
	run.Leave() // after a panic in a disk call, another goroutine may be the reader
	c.fail(errPanic)
	sess := c.session()
	sess.mu.Lock()
	if run.ownsLocked() {
		sess.forgetLocked(run.task)
	}
	sess.mu.Unlock()
	run.buf.Release()
	if run.Reading && !run.Late {
		c.releaseReader()
	}
	c.panicked(p)
}

// ownsLocked reports whether the runner still owns the task that it had last. Guarded by
// session.mu.
func (r *runner) ownsLocked() bool { return r.task != nil && r.task.owner == r }

func (c *conn) panicked(p any) {
	defer c.close()
	c.srv.opt.Disks.Observer.PanicCaught()
	c.log().Error("internal error: the session ends", zap.Any("panic", p),
		zap.ByteString("stack", debug.Stack()))
	c.fail(errPanic)
	if sess := c.session(); sess != nil {
		sess.end(errPanic)
	}
}

// spawn runs f in a goroutine. f sends on the connection, and Shutdown waits for it.
func (c *conn) spawn(f func()) {
	c.srv.conns.Goroutines.Go(func() {
		defer c.recoverPanic()
		f()
	})
}
