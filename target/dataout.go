package target

import (
	"errors"
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// dataOut collects the data that an initiator sends for a command (RFC 7143 4.2.5, 11.8). The data
// comes in bursts: first immediate and unsolicited data, then one burst for each R2T, one at a
// time. A burst is collected in memory and executed when it is complete.
type dataOut struct {
	// bytes that the command uses: those that the CDB needs and the initiator announces
	want  int64
	total int64 // bytes received and used

	// The current burst: initiator offsets [start, end). Bytes beyond want are dropped.
	next   int64  // offset of the next byte
	end    int64  // offset at which the burst ends
	tag    uint32 // target transfer tag; the reserved tag in the unsolicited burst
	dataSN uint32 // of the next Data-Out of the burst

	r2tSN uint32 // of the next R2T

	// bytes [base, base+fill) of the command. A partial block at the end of a burst stays for the
	// next burst, so that blocks are written whole.
	buf  *memory.Buffer
	base int64
	fill int
	size int // bytes to allocate when the first data of the burst arrives

	failed error // not nil: the burst is lost, and its rest is dropped
}

func (d *dataOut) release() {
	d.buf.Release()
	*d = dataOut{}
}

// blockAlign is the alignment in bytes of the data for the SCSI layer: a page of the page cache.
const blockAlign = 4096

// startWrite begins a command that takes data. seg is its immediate data.
func (c *conn) startWrite(run *runner, t *task, cmd *pdu.SCSICommand, seg *segment) error {
	p := &t.sess.params
	d := &t.out
	announced := t.expectOut
	*d = dataOut{want: min(t.scsi.Length, announced), tag: pdu.ReservedTag}
	unsolicited := min(announced, int64(p.FirstBurstLength))
	// Without the F bit, unsolicited Data-Out PDUs follow, up to the first burst.
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
		c.awaitData(t)
		return nil
	}
	return c.burstDone(run, t)
}

// burstMemory returns the size in bytes of the buffer for a burst that ends at end.
func (c *conn) burstMemory(t *task, end int64) int {
	if t.scsi.Gather {
		return int(t.scsi.Length)
	}
	return int(min(end, t.out.want) - t.out.base)
}

// collect puts a data segment into its place. It may allocate memory, but never waits for a disk.
// It consumes the whole segment unless it fails.
func (c *conn) collect(t *task, seg *segment) error {
	d := &t.out
	n := min(int64(seg.left), max(d.want-d.next, 0))
	if n > 0 && d.buf == nil {
		d.buf = c.share.Get(d.size)
		if d.buf == nil {
			return errBusy
		}
	}
	d.next += int64(seg.left)
	if n > 0 {
		if err := seg.readInto(d.buf.B[d.fill : d.fill+int(n)]); err != nil {
			return err
		}
		d.fill += int(n)
		d.total += n
	}
	return seg.discard()
}

// loseBurst fails a command whose data has a wrong digest or gets no memory. final says that no
// more PDUs of the burst follow. It returns any other cause, as an error of the connection.
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

// awaitData makes the task wait for its next data.
func (c *conn) awaitData(t *task) {
	s := t.sess
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.state == taskAborted || s.closed {
		s.dropLocked(t)
		return
	}
	t.state, t.owner = taskCollecting, nil
}

// resume takes the collecting task with this tag back from the session, for run. It returns nil if
// there is none.
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

// handleDataOut handles one Data-Out PDU (RFC 7143 11.7). It silently drops a PDU that belongs to
// no command: the command may have been aborted, or may have failed before its unsolicited data
// arrived.
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
		c.awaitData(t)
		return c.refuse(pdu.RejectInvalidPDUField, seg)
	}
	if d.failed != nil {
		return c.dropBurst(t, seg, p.Final)
	}
	switch {
	case p.DataSN != d.dataSN:
		// An earlier PDU was lost. Error recovery level 0 does not ask for it again (RFC 7143 7.9).
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
			// the burst is complete, but the peer wants to send more
			d.failed = errTooMuch(d.tag)
		}
		c.awaitData(t)
		return nil
	}
	if d.next < d.end {
		// The burst ended too early (RFC 7143 11.4.7.2).
		c.complete(t, errWrongAmount)
		return nil
	}
	return c.burstDone(run, t)
}

// dropBurst drops a PDU of a lost burst. The command ends with the last PDU of the burst, so that
// none is under way when the tag is free again (RFC 7143 7.8, 7.9).
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
	t.out.buf.Release()
	t.out.buf = nil
	c.awaitData(t)
	return nil
}

// errTooMuch returns the error for data beyond the end of a burst: it was unsolicited, or the R2T
// asked for less (RFC 7143 11.4.7.2).
func errTooMuch(tag uint32) error {
	if tag == pdu.ReservedTag {
		return errUnexpectedUnsolicited
	}
	return errWrongAmount
}

// burstDone executes as much as a complete burst allows, and asks for the next burst or ends the
// command.
func (c *conn) burstDone(run *runner, t *task) error {
	d := &t.out
	last := d.total >= d.want
	if t.scsi.Gather && !last {
		return c.sendR2T(t)
	}
	if n := d.ready(last); n > 0 {
		t.begun = time.Since(c.srv.start)
		c.enter(run, t)
		err := t.scsi.Out(d.base, d.buf.B[:n])
		if err == nil && last {
			var status scsi.Status
			status, err = t.scsi.Finish()
			run.Leave()
			c.respond(t, status, err)
			return c.flushUnlessReader(run)
		}
		run.Leave()
		if err != nil {
			c.complete(t, err)
			return c.flushUnlessReader(run)
		}
		d.carry(n)
	} else if last {
		return c.finishTask(run, t)
	}
	if err := c.sendR2T(t); err != nil {
		return err
	}
	return c.flushUnlessReader(run)
}

// ready returns how many of the collected bytes may be executed: whole pages, or all with last.
func (d *dataOut) ready(last bool) int {
	if last {
		return d.fill
	}
	return d.fill &^ (blockAlign - 1)
}

// carry drops the first n collected bytes, which are executed, and moves the rest to the front.
func (d *dataOut) carry(n int) {
	d.base += int64(n)
	d.fill -= n
	if d.fill == 0 {
		d.buf.Release()
		d.buf = nil
		return
	}
	copy(d.buf.B, d.buf.B[n:n+d.fill])
}

// sendR2T asks for the next burst (RFC 7143 11.8).
func (c *conn) sendR2T(t *task) error {
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
		if d.buf != nil && cap(d.buf.B) < d.size {
			b := c.share.Must(d.size)
			copy(b.B, d.buf.B[:d.fill])
			d.buf.Release()
			d.buf = b
		} else if d.buf != nil {
			d.buf.B = d.buf.B[:d.size]
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
