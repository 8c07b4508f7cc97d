package nbd

import (
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
)

// A relay serves a disk that another server has. Nearly all of its requests are reads and writes
// that are sent there, and whose replies come back. A goroutine that waits for each of them would
// cost more than all the rest. So such a request is forwarded, and the goroutine that receives the
// server's replies answers it. More complicated requests, and those that fail in any way, are
// executed like requests to any other disk.

// forwarded is a request that was forwarded. It keeps the disk and its range.
type forwarded struct {
	call
	link    *link
	c       *conn
	asked   request // the client's request
	arrived time.Time
	buf     *memory.Buffer
	hold    rangelock.Hold
}

var forwardedPool = sync.Pool{New: func() any { return new(forwarded) }}

// forward forwards a request, and reports whether it did. The data of a write is in run.buf. If it
// returns false, it has sent all queued requests, because this one may have to wait for one of
// them.
func (run *run) forward() bool {
	if run.c.far == nil {
		return false
	}
	if run.queue() {
		return true
	}
	run.sendForwarded()
	return false
}

// queue queues a request for the server of the disk, if it can be forwarded.
func (run *run) queue() bool {
	c, q := run.c, &run.req
	l, writes := c.far.now(), q.command == cmdWrite
	flags := q.flags &^ cmdFlagPayloadLen
	if !writes {
		flags &^= cmdFlagDF // the answer is one chunk in any case
	}
	switch {
	case l == nil || flags != 0 || !writes && q.command != cmdRead || writes && l.readOnly():
		return false
	case writes && !l.shared && q.length > uint64(c.far.kept.largest()):
		return false
	case q.length == 0 || q.length > chunk || q.length > uint64(c.far.first.limit) ||
		!aligned(int64(q.off), int64(q.off+q.length)):
		return false
	}
	buf := run.buf
	if !writes {
		buf = c.share.Get(int(q.length))
	}
	if buf == nil {
		return false
	}
	if !run.post(l, buf) {
		if !writes {
			buf.Release()
		}
		return false
	}
	run.buf = nil
	if !run.Reading { // begin has taken long, and another goroutine is the reader
		l.flush()
		return true
	}
	if c.posted != l {
		c.sendForwarded()
		c.posted = l
	}
	if c.weight += socket.MessageCost + len(buf.B)/forwardShare; c.weight >= forwardAt {
		c.sendForwarded()
	}
	return true
}

// post queues the request for the server, unless that would have to wait. buf is for its data.
func (run *run) post(l *link, buf *memory.Buffer) bool {
	c, q := run.c, &run.req
	if run.begin() != nil {
		return false
	}
	p := forwardedPool.Get().(*forwarded)
	p.link, p.c, p.asked, p.arrived, p.buf = l, c, *q, run.arrived, buf
	p.set(q.command, 0, q.off, q.length, buf.B)
	p.forwarded, p.abandoned = p, false
	c.Add()
	if run.prepare(p) {
		if l.post(&p.call) == nil {
			return true
		}
		p.giveBack()
		c.disk.Ranges.Unlock(&p.hold)
	}
	c.disk.End()
	p.leave()
	return false
}

const (
	// forwardAt is the weight of requests that wait to be sent while more come: sixteen small ones,
	// or 256 KiB of writes.
	forwardAt    = 16 * socket.MessageCost
	forwardShare = 128
)

// prepare takes the range, and the room that a write needs, unless it would have to wait for them.
// A read takes its range only when serving.Request.Read does. A write to a disk that others write,
// too, is durable when the server acknowledges it, and is not kept: see Remote.
func (run *run) prepare(p *forwarded) bool {
	c, q, r := run.c, &run.req, run.c.far
	if q.command == cmdRead {
		if c.disk.Exclusive() || c.disk.Protected() {
			return true
		}
		p.hold.Set(rangelock.Read, "", int64(q.off), int64(q.length))
		return c.disk.Ranges.LockContext(disk.AtHand, &p.hold) == nil
	}
	if p.link.shared {
		p.flags = cmdFlagFUA
	}
	p.hold.Set(rangelock.Write, c.client.Name(), int64(q.off), int64(q.length))
	if c.disk.Ranges.LockContext(disk.AtHand, &p.hold) != nil {
		return false
	}
	if run.permitted() == nil {
		if p.link.shared {
			return true
		}
		if p.logged = r.kept.reserve(disk.AtHand, int(q.length)) == nil; p.logged {
			return true
		}
	}
	c.disk.Ranges.Unlock(&p.hold)
	return false
}

// sendForwarded sends the forwarded requests that are queued. They keep their ranges, so the reader
// calls it before it waits for anything, and before it ends.
func (c *conn) sendForwarded() {
	if l := c.posted; l != nil {
		c.posted, c.weight = nil, 0
		l.flush()
	}
}

// sendForwarded is conn.sendForwarded for the reader. Other goroutines do nothing.
func (run *run) sendForwarded() {
	if run.Reading {
		run.c.sendForwarded()
	}
}

// completed answers the request. Without an error, only the goroutine that receives may call it.
// After an error the request is executed by a goroutine of its own.
func (p *forwarded) completed(err error) {
	c, q := p.c, &p.asked
	if err != nil {
		p.giveBack()
		c.srv.disks.Memory.Charge(serving.StackCharge)
		go p.execute()
		return
	}
	p.release()
	if q.command == cmdWrite {
		p.buf.Release() // nil if Remote.kept has taken it
		c.bytesWritten.Add(q.length)
		c.answer(q, q.length)
	} else {
		c.bytesRead.Add(q.length)
		c.answerData(q, q.off, p.buf.B, p.buf, true)
	}
	c.note(q, p.arrived, nil)
	p.link.noteUnsent(c)
	p.leave()
}

// release gives up the range and the disk.
func (p *forwarded) release() {
	p.c.disk.Ranges.Unlock(&p.hold)
	p.c.disk.End()
}

// giveBack releases the room of a write that was not acknowledged.
func (p *forwarded) giveBack() {
	if p.logged {
		p.c.far.kept.giveBack(len(p.data))
	}
}

// leave ends the request. Its memory may be reused.
func (p *forwarded) leave() {
	c := p.c
	p.link, p.c, p.buf, p.data, p.forwarded = nil, nil, nil, nil, nil
	forwardedPool.Put(p)
	c.Done()
}

// execute executes the request like one to any other disk: it waits for the server, and answers an
// error.
func (p *forwarded) execute() {
	c := p.c
	defer c.Done()
	run := &run{Turn: c.role.WithoutRole(), c: c, req: p.asked, buf: p.buf, arrived: p.arrived}
	run.r.Executor = run
	err := run.executeForwarded(&p.hold)
	if ferr := c.tx.Flush(); err == nil {
		err = ferr
	}
	c.srv.disks.Memory.Charge(-serving.StackCharge)
	if err != nil {
		c.fail(err)
	}
}

// executeForwarded executes a request for which forward has kept the disk and its range.
func (run *run) executeForwarded(hold *rangelock.Hold) (err error) {
	c, q := run.c, &run.req
	defer func() {
		if p := recover(); p != nil {
			run.forget()
			err = c.panicked(p)
		}
	}()
	defer c.disk.End()
	defer c.disk.Ranges.Unlock(hold)
	if q.command == cmdWrite {
		if err = run.storeLocked(run.buf.B, int64(q.off)); err == nil {
			c.answer(q, q.length)
		}
		return run.finish(err)
	}
	c.bytesRead.Add(q.length)
	if _, err = run.r.ReadAt(c.disk, run.buf.B, int64(q.off)); err == nil {
		b := run.buf
		run.buf = nil
		c.answerData(q, q.off, b.B, b, true)
	}
	return run.finish(err)
}

// noteUnsent notes that a connection has replies to send. The receiving goroutine calls it.
func (l *link) noteUnsent(c *conn) {
	if n := len(l.unsent); n == 0 || l.unsent[n-1] != c {
		l.unsent = append(l.unsent, c)
		c.srv.conns.Goroutines.Add(1) // above 0 already: a forwarded request is counted
	}
	l.urgent = l.urgent || c.tx.full()
}

// sendUnsent sends the replies of forwarded requests, before the receiving goroutine waits for the
// server. It returns true if another goroutine receives now, because a client takes its replies
// slowly.
func (l *link) sendUnsent() (passedOn bool) {
	if len(l.unsent) == 0 || l.in.Buffered() > 0 && !l.urgent {
		return false
	}
	l.urgent = false
	for n := len(l.unsent) - 1; n >= 0; n-- {
		c := l.unsent[n]
		l.unsent[n] = nil
		l.unsent = l.unsent[:n]
		passedOn = c.tx.FlushElse(l.passOn)
		c.srv.conns.Goroutines.Done()
		if passedOn {
			return true
		}
	}
	return false
}

// sendAllUnsent is sendUnsent when the connection to the server has ended. It does not wait.
func (l *link) sendAllUnsent() {
	for _, c := range l.unsent {
		go func() {
			defer c.srv.conns.Goroutines.Done()
			_ = c.tx.Flush() // the reader of that connection learns of an error, too
		}()
	}
	l.unsent = nil
}

// Unanswered implements serving.Forwarder.
func (r *Remote) Unanswered(each func(c *serving.Client, since time.Time)) {
	l := r.now()
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, call := range l.calls {
		if p := call.forwarded; p != nil && !call.abandoned {
			each(p.c.client, p.arrived)
		}
	}
}

// Connected implements serving.Forwarder.
func (r *Remote) Connected() bool { return r.now() != nil }

// now returns the present connection to the server, or nil.
func (r *Remote) now() *link {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.link
}

// giveUp ends the forwarded reads of a connection: it has ended, or its client is fenced.
func (r *Remote) giveUp(c *conn) {
	l := r.now()
	if l == nil {
		return
	}
	var all []*forwarded
	l.mu.Lock()
	for _, call := range l.calls {
		if p := call.forwarded; p != nil && p.c == c && call.command == cmdRead && !call.filling &&
			!call.abandoned {
			call.abandoned = true
			all = append(all, p)
		}
	}
	l.mu.Unlock()
	for _, p := range all {
		p.completed(errAbandoned)
	}
}
