package nbd

import (
	"math"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/serving"
)

// read executes and answers a read.
func (run *run) read() error {
	c, q, d := run.c, &run.req, run.c.disk
	if err := run.begin(); err != nil {
		return err
	}
	defer d.End()
	if !run.late {
		c.bytesRead.Add(q.length)
	}
	switch {
	case q.length == 0:
		c.answer(q, 0)
		return nil
	case c.structured && q.flags&cmdFlagDF == 0 &&
		(q.length > chunk || q.length >= holesFrom && d.Extents != nil):
		return run.readChunks()
	case q.length > chunk:
		return run.readWhole()
	}
	var err error
	if run.buf, err = run.take(int(q.length)); err != nil {
		return err
	}
	run.enter()
	run.single = true
	_, err = run.r.Read(d, run.buf.B, int64(q.off))
	run.single = false
	run.leave()
	if err != nil {
		return err
	}
	b := run.buf
	run.buf = nil
	c.answerData(q, q.off, b.B, b, true)
	return nil
}

// readWhole reads all data before it answers: a simple reply, or a client that wants one chunk,
// leaves no place for an error in the middle.
func (run *run) readWhole() error {
	c, q := run.c, &run.req
	if q.length > maxBlock {
		return fail(eOverflow, "a read of %d bytes in one piece: %d are the most", q.length,
			maxBlock)
	}
	run.enter()
	defer run.Leave()
	for off := uint64(0); off < q.length; {
		if err := run.permitted(); err != nil {
			return err
		}
		n := min(q.length-off, chunk)
		b := c.share.Get(int(n))
		if b == nil {
			// queued replies may hold the memory
			if err := run.OutsideCall(run.flush); err != nil {
				return err
			}
			if b = c.share.Get(int(n)); b == nil {
				return errMemory
			}
		}
		run.more = append(run.more, b)
		if _, err := run.r.Read(c.disk, b.B, int64(q.off+off)); err != nil {
			return err
		}
		off += n
	}
	c.tx.Lock()
	defer c.tx.Unlock()
	for i, b := range run.more {
		r := c.tx.put(b.B, b)
		if i > 0 {
			continue
		}
		if !c.structured {
			r.simple(q.cookie, 0)
			continue
		}
		r.chunk(q, c.extended, replyFlagDone, chunkData, q.length+8)
		r.put64(q.off)
	}
	clear(run.more)
	run.more = run.more[:0]
	return nil
}

// readChunks answers a read chunk by chunk, so that a long read has only one chunk in memory. It
// sends no holes.
func (run *run) readChunks() error {
	c, q, d := run.c, &run.req, run.c.disk
	for off, end := q.off, q.off+q.length; off < end; {
		if err := run.permitted(); err != nil {
			return err
		}
		e, b, err := run.nextChunk(int64(off), int64(end-off))
		if err != nil {
			return err
		}
		n := uint64(e.Length)
		if b == nil {
			run.answerHole(off, n, off+n == end)
		} else {
			c.answerData(q, off, b.B, b, off+n == end)
		}
		off += n
		run.r.Moved(d)
		if off < end && (c.tx.full() || !run.Reading) {
			if err := run.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// nextChunk reads the next part of a read, at most length bytes: a hole, or data in a buffer.
func (run *run) nextChunk(off, length int64) (e disk.Extent, b *memory.Buffer, err error) {
	d := run.c.disk
	e = disk.Extent{Length: length, Data: true}
	if d.Extents != nil {
		run.enter()
		e, err = run.r.Extent(d, off, min(length, math.MaxUint32))
		run.Leave()
		if err != nil {
			return e, nil, err
		}
	}
	if !e.Data {
		return e, nil, nil
	}
	e.Length = min(e.Length, chunk)
	if run.buf = run.c.share.Get(int(e.Length)); run.buf == nil { // in run, so it is released
		if err := run.flush(); err != nil {
			return e, nil, err
		}
		e.Length = min(e.Length, poorPiece)
		run.buf = run.c.share.Must(int(e.Length))
	}
	run.enter()
	_, err = run.r.Read(d, run.buf.B, off)
	run.Leave()
	if err != nil {
		return e, nil, err
	}
	b, run.buf = run.buf, nil
	return e, b, nil
}

// flush sends the queue. If the client is gone, that is not the disk's fault.
func (run *run) flush() error {
	c := run.c
	if err := c.tx.Flush(); err != nil {
		c.fail(err)
	}
	if c.Cause() != nil {
		return serving.ErrAborted
	}
	return nil
}

// take returns memory for an answer in one piece. A guest would take an error for a broken disk. So
// a client that has used up its share waits until some of its replies are sent. If the connection
// has nothing else to send, it gets a small piece at once.
func (run *run) take(n int) (*memory.Buffer, error) {
	const longestWait = 64 * time.Millisecond
	c := run.c
	for wait := time.Millisecond; ; wait = min(2*wait, longestWait) {
		if b := c.share.Get(n); b != nil {
			return b, nil
		}
		if err := run.flush(); err != nil {
			return nil, err
		}
		if n <= poorPiece {
			return c.share.Must(n), nil
		}
		if err := run.permitted(); err != nil {
			return nil, err
		}
		time.Sleep(wait)
	}
}
