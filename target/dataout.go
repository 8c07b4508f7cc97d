package target

import (
	"errors"
	"time"

	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// dataOut collects the data that an initiator sends for a command (RFC 7143 4.2.5, 11.8). The data comes in
// bursts: first what the initiator may send unasked, then one burst for each R2T, one at a time. A burst is
// collected in memory, and executed when it is complete.
type dataOut struct {
	want  int64 // bytes that the command takes from the initiator: of what it announced, what the CDB needs
	total int64 // bytes received and used

	// The burst that is being collected: initiator offsets [start, end). Bytes of it that go beyond want
	// are dropped.
	next   int64  // offset of the next byte
	end    int64  // offset at which the burst ends
	tag    uint32 // target transfer tag; the reserved tag in the unsolicited burst
	dataSN uint32 // of the next Data-Out of the burst

	r2tSN uint32 // of the next R2T

	// The memory: bytes [base, base+fill) of the command. What a burst leaves over of a block stays for
	// the next one, so that blocks are written whole.
	buf  *buffer
	base int64
	fill int
	size int // bytes to allocate when the first data of the burst arrives

	failed error // not nil: the burst is lost, and what is left of it is dropped
}

func (d *dataOut) release() {
	d.buf.release()
	*d = dataOut{}
}

// blockAlign is the alignment of what is handed to the SCSI layer, bytes: a page of the page cache.
const blockAlign = 4096

// startWrite begins a command that takes data, with the data that came with it.
func (c *conn) startWrite(run *runner, t *task, cmd *pdu.SCSICommand, seg *segment) error {
	p := &t.sess.params
	d := &t.out
	announced := t.expectOut
	*d = dataOut{want: min(t.scsi.Length, announced), tag: pdu.ReservedTag}
	unsolicited := min(announced, int64(p.FirstBurstLength))
	// Without the F bit unsolicited Data-Out PDUs follow, up to the first burst.
	more := !cmd.Final && announced > 0
	switch n := int64(seg.n); {
	case n > 0 && !p.ImmediateData, more && p.InitialR2T, n > unsolicited:
		return c.refuseCommand(t, cmd, seg, errUnexpectedUnsolicited)
	case more:
		d.end = unsolicited
	default:
		d.end = n
	}
	d.size = c.burstMemory(t, d.end)
	if err := c.collect(t, seg); err != nil {
		return c.loseBurst(t, seg, err, !more)
	}
	if more {
		c.wait(t)
		return nil
	}
	return c.burstDone(run, t)
}

// burstMemory is the size of the buffer for a burst that ends at end, bytes.
func (c *conn) burstMemory(t *task, end int64) int {
	if t.scsi.Gather {
		return int(t.scsi.Length)
	}
	return int(min(end, t.out.want) - t.out.base)
}

// collect puts a data segment where it belongs. It may take memory, never blocks on a disk, and leaves
// nothing of the segment behind unless it fails.
func (c *conn) collect(t *task, seg *segment) error {
	d := &t.out
	n := min(int64(seg.left), max(d.want-d.next, 0))
	if n > 0 && d.buf == nil {
		d.buf = c.srv.pool.get(d.size)
		if d.buf == nil {
			return errBusy
		}
	}
	d.next += int64(seg.left)
	if n > 0 {
		if err := seg.readInto(d.buf.b[d.fill : d.fill+int(n)]); err != nil {
			return err
		}
		d.fill += int(n)
		d.total += n
	}
	return seg.discard()
}

// loseBurst ends a command whose data could not be taken: a wrong digest, or no memory. final says that nothing
// of the burst follows. Any other error is the connection's.
func (c *conn) loseBurst(t *task, seg *segment, cause error, final bool) error {
	switch {
	case errors.Is(cause, errDataDigest):
		c.reject(pdu.RejectDataDigest)
		t.out.failed = errServiceCRC
		return c.dropBurst(t, seg, final)
	case errors.Is(cause, errBusy):
		t.out.failed = cause
		return c.dropBurst(t, seg, final)
	}
	c.abandon(t)
	return cause
}

// wait leaves the task to the data that is still to come.
func (c *conn) wait(t *task) {
	s := t.sess
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.state == taskAborted || s.closed {
		s.dropLocked(t)
		return
	}
	t.state, t.owner = taskCollecting, nil
}

// resume takes a collecting task back from the session, or says that there is none of this tag.
func (s *session) resume(run *runner, tag uint32) *task {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tasks[tag]
	if t == nil || t.state != taskCollecting {
		return nil
	}
	t.state, t.owner, run.task = taskExecuting, run, t
	t.scsi.Executor = run
	return t
}

// handleDataOut takes one Data-Out PDU (RFC 7143 11.7). One that belongs to no command is dropped in
// silence: the command may just have been aborted, or have failed before its unsolicited data arrived.
func (c *conn) handleDataOut(run *runner, h *pdu.Header, seg *segment) error {
	var p pdu.DataOut
	if err := p.Decode(h); err != nil {
		return c.malformed(err)
	}
	t := c.session().resume(run, p.TaskTag)
	if t == nil {
		return c.ignore(seg)
	}
	d := &t.out
	if p.TransferTag != d.tag {
		c.wait(t)
		return c.refuse(pdu.RejectInvalidPDUField, seg)
	}
	if d.failed != nil {
		return c.dropBurst(t, seg, p.Final)
	}
	switch {
	case p.DataSN != d.dataSN:
		// A PDU before this one was lost, which level 0 does not ask for again (RFC 7143 7.9).
		d.failed = errServiceCRC
		return c.dropBurst(t, seg, p.Final)
	case int64(p.BufferOffset) != d.next:
		d.failed = errDataPhase
		return c.dropBurst(t, seg, p.Final)
	}
	if d.next+int64(p.DataLen) > d.end {
		d.failed = errTooMuch(d.tag)
		return c.dropBurst(t, seg, p.Final)
	}
	d.dataSN++
	if err := c.collect(t, seg); err != nil {
		return c.loseBurst(t, seg, err, p.Final)
	}
	if !p.Final {
		if d.next == d.end {
			d.failed = errTooMuch(d.tag) // the burst is complete, and the peer means to send more of it
		}
		c.wait(t)
		return nil
	}
	if d.next < d.end {
		// The burst has ended too early (RFC 7143 11.4.7.2).
		c.complete(t, errWrongAmount)
		return nil
	}
	return c.burstDone(run, t)
}

// dropBurst drops a PDU of a burst that is lost. The command ends with the burst's last PDU and not before, so that none
// of the burst is on its way when the tag is free again (RFC 7143 7.8, 7.9).
func (c *conn) dropBurst(t *task, seg *segment, final bool) error {
	if final {
		return c.dropData(t, seg, t.out.failed)
	}
	if err := seg.discard(); errors.Is(err, errDataDigest) {
		c.reject(pdu.RejectDataDigest)
	} else if err != nil {
		c.abandon(t)
		return err
	}
	t.out.buf.release()
	t.out.buf = nil
	c.wait(t)
	return nil
}

// errTooMuch is what is wrong with data beyond the end of a burst: nobody asked for it, or an R2T asked for less
// (RFC 7143 11.4.7.2).
func errTooMuch(tag uint32) error {
	if tag == pdu.ReservedTag {
		return errUnexpectedUnsolicited
	}
	return errWrongAmount
}

// burstDone executes what a complete burst allows, and asks for the next burst or ends the command.
func (c *conn) burstDone(run *runner, t *task) error {
	d := &t.out
	last := d.total >= d.want
	if t.scsi.Gather && !last {
		return c.ask(t)
	}
	if n := d.ready(last); n > 0 {
		t.begun = time.Since(c.srv.start)
		c.enter(run, t)
		err := t.scsi.Out(d.base, d.buf.b[:n])
		if err == nil && last {
			var status scsi.Status
			status, err = t.scsi.Finish()
			c.leave(run)
			c.respond(t, status, err)
			return c.sent(run)
		}
		c.leave(run)
		if err != nil {
			c.complete(t, err)
			return c.sent(run)
		}
		d.carry(n)
	} else if last {
		return c.finishTask(run, t)
	}
	if err := c.ask(t); err != nil {
		return err
	}
	return c.sent(run)
}

// ready is how many of the collected bytes may be executed: whole pages, or all at the end.
func (d *dataOut) ready(last bool) int {
	if last {
		return d.fill
	}
	return d.fill &^ (blockAlign - 1)
}

// carry drops the first n collected bytes, which have been executed, and moves the rest to the front.
func (d *dataOut) carry(n int) {
	d.base += int64(n)
	d.fill -= n
	if d.fill == 0 {
		d.buf.release()
		d.buf = nil
		return
	}
	copy(d.buf.b, d.buf.b[n:n+d.fill])
}

// ask sends an R2T for the next burst (RFC 7143 11.8).
func (c *conn) ask(t *task) error {
	s := t.sess
	d := &t.out
	n := min(d.want-d.next, int64(s.params.MaxBurstLength))
	if t.scsi.Gather {
		if d.buf == nil {
			d.size = int(t.scsi.Length)
		}
	} else {
		n = min(n, chunkSize-int64(d.fill))
		d.size = d.fill + int(n)
		if d.buf != nil && cap(d.buf.b) < d.size {
			b := c.srv.pool.must(d.size)
			copy(b.b, d.buf.b[:d.fill])
			d.buf.release()
			d.buf = b
		} else if d.buf != nil {
			d.buf.b = d.buf.b[:d.size]
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.state == taskAborted || s.closed {
		s.dropLocked(t)
		return nil
	}
	d.end = d.next + n
	d.tag = c.nextTag()
	d.dataSN = 0
	c.tx.send(&pdu.R2T{LUN: t.scsi.LUN, TaskTag: t.tag, TransferTag: d.tag, R2TSN: d.r2tSN,
		BufferOffset: uint32(d.next), DesiredLength: uint32(n)}, snPeek, nil, nil)
	d.r2tSN++
	t.state, t.owner = taskCollecting, nil
	return nil
}
