package target

import (
	"errors"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/login"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

const (
	// chunkSize is how many bytes of a command's data are in memory at a time. One R2T asks for at
	// most as many.
	chunkSize = login.MaxDataSegment

	// heldChunk is the same for a read that waits for far content while memory is scarce, or while
	// its client has used up its share. Such reads may take long and must leave memory for others.
	heldChunk = 16 << 10
)

// runRead executes a command that returns data. It sends the data chunk by chunk, so that a long
// READ has only one chunk in memory. The last Data-In carries good status (RFC 7143 11.7).
func (c *conn) runRead(run *runner, t *task) error {
	total := min(t.scsi.Length, t.expectIn)
	if total == 0 {
		return c.finishTask(run, t)
	}
	b := c.share.Get(int(min(total, chunkSize)))
	if b == nil && run.late { // queued answers may hold the memory
		if err := c.tx.Flush(); err != nil {
			c.abandon(t)
			return err
		}
		b = c.share.Must(int(min(total, heldChunk)))
	}
	if b == nil {
		c.complete(t, errBusy)
		return c.flushUnlessReader(run)
	}
	for off := int64(0); ; {
		run.buf = b
		c.enter(run, t)
		run.single = off == 0 && int64(len(b.B)) == total
		err := t.scsi.In(off, b.B)
		run.single = false
		status := scsi.StatusGood
		last := off+int64(len(b.B)) == total
		if err == nil && last {
			status, err = t.scsi.Finish()
		}
		run.Leave()
		run.buf = nil
		if err == serving.ErrLater {
			b.Release()
			c.postpone(run.Turn, t)
			return nil
		}
		if errors.Is(err, errSmallerSteps) {
			b.Release()
			b = c.share.Must(int(min(total-off, heldChunk)))
			continue
		}
		if err != nil {
			b.Release()
			c.complete(t, err)
			return c.flushUnlessReader(run)
		}
		off += int64(len(b.B))
		good := last && status == scsi.StatusGood
		if !c.sendChunk(run, t, b, total, good) {
			return c.flushUnlessReader(run)
		}
		if last {
			if !good {
				c.respond(t, status, nil)
			}
			return c.flushUnlessReader(run)
		}
		n := int(min(total-off, chunkSize))
		b = nil
		if run.queued < c.flushAt() && run.Reading {
			b = c.share.Get(n)
		}
		if b == nil {
			if err := c.tx.Flush(); err != nil {
				c.abandon(t)
				return err
			}
			b = c.share.Get(n)
		}
		if b == nil { // no other data of the connection is in memory
			b = c.share.Must(min(n, heldChunk))
		}
	}
}

// finishTask executes and ends a command with no data, or no more data, to move.
func (c *conn) finishTask(run *runner, t *task) error {
	if t.scsi.Op() != serving.OpOther && c.srv.pool.Exhausted() {
		// the command may hang in the disk, and its goroutine needs memory, too
		c.complete(t, errBusy)
		return c.flushUnlessReader(run)
	}
	c.enter(run, t)
	status, err := t.scsi.Finish()
	run.Leave()
	c.respond(t, status, err)
	return c.flushUnlessReader(run)
}

// abandon ends a task after its connection is lost.
func (c *conn) abandon(t *task) {
	s := t.sess
	s.mu.Lock()
	s.dropLocked(t)
	s.mu.Unlock()
}

// sendChunk queues b as Data-In PDUs, none longer than the initiator takes, with the F bit at the
// end of each burst (RFC 7143 11.7.1). With good, these are the last PDUs; the last one carries
// good status, and the task ends. sendChunk reports whether it queued b: if the task was aborted
// meanwhile, it ends here without an answer.
func (c *conn) sendChunk(run *runner, t *task, b *memory.Buffer, total int64, good bool) bool {
	s := t.sess
	burst := int64(s.params.MaxBurstLength)
	data := b.B
	end := t.sent + int64(len(data))

	s.mu.Lock()
	defer s.mu.Unlock()
	seg := int64(s.params.SendMaxDataSegment)
	if t.state == taskAborted {
		b.Release()
		s.dropLocked(t)
		return false
	}
	p := pdu.DataIn{TaskTag: t.tag, TransferTag: pdu.ReservedTag}
	c.tx.Lock()
	defer c.tx.Unlock()
	for len(data) > 0 {
		n := min(int64(len(data)), seg, burst-t.sent%burst)
		p.DataSN, p.BufferOffset, p.DataLen = t.snIn, uint32(t.sent), int(n)
		t.snIn++
		t.sent += n
		p.Final = t.sent == total || t.sent%burst == 0
		sn, release := snNone, (*memory.Buffer)(nil)
		if t.sent == end {
			release = b
			if good {
				sn = snAdvance
				p.HasStatus = true
				p.Overflow, p.Underflow, p.Residual = t.residual(false)
			}
		}
		o := c.tx.putLocked(sn, data[:n], release)
		p.Encode((*pdu.Header)(o.hdr[:pdu.HeaderLen]))
		data = data[n:]
	}
	run.queued = c.tx.WeightLocked()
	if good {
		c.observe(t, uint8(scsi.StatusGood))
		s.forgetLocked(t)
	}
	return true
}
