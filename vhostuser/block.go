package vhostuser

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/serving"
)

// Types of requests and their statuses, virtio 1.2, section 5.2.6.
const (
	blkIn          = 0
	blkOut         = 1
	blkFlush       = 4
	blkGetID       = 8
	blkDiscard     = 11
	blkWriteZeroes = 13

	statusOK    = 0
	statusIOErr = 1
	statusUnsup = 2
)

const (
	blkHeader = 16
	// idSize is how many bytes GET_ID has.
	idSize = 20
	// rangeSize is how many bytes describe a range to discard or to zero. maxRanges is the most of
	// them in a request.
	rangeSize = 16
	maxRanges = 16
	flagUnmap = 1
	// maxRangeSectors is the longest range: 2 GiB.
	maxRangeSectors = 1 << 22
	// stretch is how much of a long range one call covers. piece is how much goes through a buffer
	// of this process at a time. Bytes.
	stretch = 64 << 20
	piece   = 256 << 10
	// sharedFrom is the length of a read, in bytes, from which other requests of the ring are
	// executed at the same time.
	sharedFrom = 128 << 10
	// scattered is the number of segments from which calls for each cost more than a copy.
	scattered = 4
)

// errUnsupported and the following ones are answers for requests that break a rule.
var (
	errUnsupported = errors.New("the request is not supported")
	errRange       = errors.New("the request does not lie in the disk")
	errReadOnly    = errors.New("the disk cannot be written")
)

// run is a goroutine that executes requests of a queue.
type run struct {
	*serving.Turn
	q     *queue
	busy  bool // it has executed something since it last slept
	taken uint // how often it has looked for a request
	ahead int  // how many it has taken since the ring was last empty
	left  bool // guarded by conn.mu; the request is given up because its ring stops
	req   *request
	r     serving.Request
	buf   *memory.Buffer
	kind  serving.Operation
	held  bool          // it is in conn.held
	begun time.Duration // from conn.since to when it began with the request
}

// request is a request of a ring, from when it is taken until it is given back.
type request struct {
	chain    chain
	table    *table        // the memory table of its chain
	arrived  time.Duration // from conn.since
	cost     int64         // counted in the limit of memory, because it waits; 0: not counted
	kind     uint32
	sector   uint64
	out, in  []segment // data for the disk, and from it
	status   []byte    // one byte
	statusAt uint64    // its guest address
}

// parse finds the parts of the request in its chain, in whatever pieces the driver gives them.
func (r *request) parse() error {
	if r.in, r.status, r.statusAt = takeLast(r.chain.in); r.status == nil {
		return errStatus
	}
	var header [blkHeader]byte
	var ok bool
	if r.out, ok = takeFront(r.chain.out, header[:]); !ok {
		return errHeader
	}
	r.kind = binary.LittleEndian.Uint32(header[:])
	r.sector = binary.LittleEndian.Uint64(header[8:])
	return nil
}

var operations = map[uint32]serving.Operation{blkIn: serving.OpRead, blkOut: serving.OpWrite,
	blkFlush: serving.OpFlush, blkDiscard: serving.OpDiscard, blkWriteZeroes: serving.OpWrite}

// serve executes and answers its request. When the connection ends, also because of the disk, a
// request without an answer stays in flight, for the next connection.
func (run *run) serve() {
	defer run.forget()
	q, c, req := run.q, run.q.c, run.req
	run.kind = operations[req.kind]
	n, err := run.execute(req)
	if err == serving.ErrLater {
		run.req = nil
		run.postpone(req)
		return
	}
	run.note(n, err)
	if err != nil && (c.Cause() != nil || errors.Is(err, serving.ErrRemoved)) {
		return
	}
	if errors.Is(err, serving.ErrAborted) && q.leave(run) {
		return
	}
	switch {
	case err == nil:
		req.status[0] = statusOK
	case errors.Is(err, errUnsupported):
		req.status[0] = statusUnsup
	default:
		req.status[0] = statusIOErr
	}
	written := uint32(1)
	if req.kind == blkIn || req.kind == blkGetID {
		for _, s := range req.in {
			c.dirty.mark(s.guest, uint64(len(s.p)))
		}
		if err == nil {
			written += uint32(lengthOf(req.in))
		}
	}
	c.dirty.mark(req.statusAt, 1)
	q.put(req.chain.head, written, run.Reading)
}

// postpone leaves a request for later: others of the ring begin first. Copying a long one takes so
// long that another goroutine does it at the same time.
func (run *run) postpone(req *request) {
	q := run.q
	q.noteWaiting(req)
	q.late.Postpone(run.Turn, req)
	if lengthOf(req.in) >= sharedFrom {
		q.late.Start()
	}
}

// forget releases the memory and the range of the request.
func (run *run) forget() {
	if run.req != nil {
		run.q.recycle(run.req)
		run.req = nil
	}
	run.buf.Release()
	run.buf = nil
	if run.held {
		run.q.c.unhold(run)
		run.held = false
	}
	if run.r.Waited() || run.r.Aborted() {
		run.r = serving.Request{Executor: run}
	}
}

// execute executes a request. It returns how many bytes were read or written.
func (run *run) execute(req *request) (n int64, err error) {
	c := run.q.c
	switch req.kind {
	case blkIn:
		n = lengthOf(req.in)
	case blkOut:
		n = lengthOf(req.out)
	case blkFlush:
		return 0, run.flush()
	case blkGetID:
		return 0, run.identify(req.in)
	case blkDiscard, blkWriteZeroes:
		return 0, run.ranges(req.kind, req.out)
	default:
		return 0, errUnsupported
	}
	if err := checkRange(req.sector, n, c.disk.Size()); err != nil || n == 0 {
		return 0, err
	}
	if off := int64(req.sector) * disk.SectorSize; req.kind == blkIn {
		err = run.read(off, req.in, n)
	} else {
		err = run.write(off, req.out, n)
	}
	return n, err
}

// checkRange refuses a range outside of a disk of that many bytes. A sector has 512 bytes, with
// every block size.
func checkRange(sector uint64, length, size int64) error {
	if length%disk.SectorSize != 0 || sector > math.MaxInt64/disk.SectorSize {
		return errRange
	}
	if off := int64(sector) * disk.SectorSize; off > size || length > size-off {
		return errRange
	}
	return nil
}

// begin counts a use of the disk for a request until disk.End, unless the client may not use it.
func (run *run) begin(write bool) error {
	c := run.q.c
	if !c.client.Used(c.disk) { // Begin may wait for other clients
		run.Enter(c.disk)
		defer run.Leave()
	}
	err := c.client.Begin(c.disk, write)
	if err == disk.ErrReadOnly {
		return errReadOnly
	}
	return err
}

// shares reports whether to leave a long read to the other reader, because this one has more to do.
// A few wait there, so that both always have something to do. Writes are not shared: the kernel
// executes one at a time in a file, so a second thread would only wait for the first.
func (run *run) shares(length int64) bool {
	return length >= sharedFrom && run.req.cost == 0 && run.Reading && run.q.late.Waiting() < 2 &&
		run.q.waiting()
}

// direct reports whether the disk itself accesses the guest's memory. It must not access memory
// that the front end can cut short, which would fault. With many small segments the calls cost more
// than a copy.
func (run *run) direct(segs []segment, length int64) bool {
	return run.req.table.sealed && (len(segs) <= scattered || length/int64(len(segs)) >= 64<<10)
}

// take takes a buffer of this process for a part of a request.
func (run *run) take(length int64) []byte {
	n := int(min(length, piece))
	if run.buf == nil {
		if run.buf = run.q.c.share.Get(n); run.buf == nil {
			run.buf = run.q.c.share.Must(min(n, 16<<10))
		}
	}
	return run.buf.B[:min(n, len(run.buf.B))]
}

// read reads a range of the disk into the guest's memory.
func (run *run) read(off int64, in []segment, length int64) error {
	c, d := run.q.c, run.q.c.disk
	if run.shares(length) {
		return serving.ErrLater
	}
	if err := run.begin(false); err != nil {
		return err
	}
	defer d.End()
	run.Enter(d)
	defer run.Leave()
	// Otherwise a change of several steps could come between the calls for two segments.
	inCalls := len(in) == 1 || length > piece || d.Exclusive() || d.Protected()
	if inCalls && run.direct(in, length) {
		for i := range in {
			if _, err := run.r.Read(d, in[i].p, off); err != nil {
				return err
			}
			off += int64(len(in[i].p))
		}
		return nil
	}
	for at, left := 0, length; left > 0; {
		p := run.take(left)
		if err := c.client.Permits(&run.r, d, false); err != nil {
			return err
		}
		if _, err := run.r.Read(d, p, off); err != nil {
			return err
		}
		at, in = scatter(p, in, at)
		off, left = off+int64(len(p)), left-int64(len(p))
		run.r.Moved(d)
	}
	return nil
}

// lock holds a range of the disk for a change. A connection that has ended begins no change: the
// next connection executes the request.
func (run *run) lock(off, length int64) error {
	c, d := run.q.c, run.q.c.disk
	run.r.Hold.Set(rangelock.Write, c.client.Name(), off, length)
	if err := run.r.Lock(d); err != nil {
		return err
	}
	err := c.client.Permits(&run.r, d, true)
	if err == nil && c.Cause() != nil {
		err = serving.ErrAborted
	}
	if err != nil {
		run.unlock()
	}
	return err
}

func (run *run) unlock() { run.q.c.disk.Ranges.Unlock(&run.r.Hold) }

// write writes the guest's memory to a range of the disk.
func (run *run) write(off int64, out []segment, length int64) error {
	c, d := run.q.c, run.q.c.disk
	if err := run.begin(true); err != nil {
		return err
	}
	defer d.End()
	run.Enter(d)
	defer run.Leave()
	if err := run.store(off, out, length); err != nil || c.writeThrough.Load() == 0 {
		return err
	}
	return d.Disk.Flush()
}

func (run *run) store(off int64, out []segment, length int64) error {
	c, d := run.q.c, run.q.c.disk
	if err := run.lock(off, length); err != nil {
		return err
	}
	defer run.unlock()
	if run.direct(out, length) {
		for i := range out {
			if _, err := run.r.WriteAt(d, out[i].p, off); err != nil {
				return err
			}
			off += int64(len(out[i].p))
		}
		return nil
	}
	for at, left := 0, length; left > 0; {
		p := run.take(left)
		at, out = gather(p, out, at)
		if err := c.client.Permits(&run.r, d, true); err != nil {
			return err
		}
		if _, err := run.r.WriteAt(d, p, off); err != nil {
			return err
		}
		off, left = off+int64(len(p)), left-int64(len(p))
		run.r.Moved(d)
	}
	return nil
}

// flush makes writes durable. It takes long, so others of the ring are executed at the same time.
func (run *run) flush() error {
	d := run.q.c.disk
	if err := run.begin(false); err != nil {
		return err
	}
	defer d.End()
	if !d.Volatile && run.Reading {
		run.Share(d)
	}
	run.Enter(d)
	defer run.Leave()
	err := d.Disk.Flush()
	if c := run.q.c; err == nil && c.writeThrough.Load()&throughMaybe != 0 {
		c.setWriteThrough(throughMaybe, false)
	}
	return err
}

// identify answers GET_ID with the serial number.
func (run *run) identify(in []segment) error {
	if lengthOf(in) < idSize {
		return errRange
	}
	var id [idSize]byte
	copy(id[:], run.q.c.disk.Identity.Serial)
	scatter(id[:], in, 0)
	return nil
}

// Waits implements serving.Executor: others of the ring are executed while the request waits for
// far content. A guest sets no timeout for its requests, so they are held for ever.
func (run *run) Waits() (time.Duration, error) {
	if !run.q.c.hold(run) {
		return 0, serving.ErrAborted
	}
	run.held = true
	run.q.noteWaiting(run.req)
	// A fence of the client ends the requests that are held. This request may come too late for
	// that.
	if !run.q.c.client.Admitted(run.q.c.disk) {
		return 0, serving.ErrAborted
	}
	run.PassOn()
	return forever, nil
}

// Blocks implements serving.Executor: a reader begins with others of the ring before it waits, so
// that storage has as much to do as the guest wants.
func (run *run) Blocks() error {
	switch {
	case !run.Reading:
		return nil
	case run.req.cost == 0:
		return serving.ErrLater
	}
	run.q.late.Waits(run.Turn)
	run.q.tellDriver() // of the requests before this one
	return nil
}

// Blocked implements serving.Executor.
func (run *run) Blocked(took time.Duration) {
	if run.req.cost != 0 {
		run.q.late.Blocked(run.Turn, took)
	}
}

// forever is longer than any request waits.
const forever = 10 * 365 * 24 * time.Hour

// note counts a request, and tells the observer how it has ended.
func (run *run) note(n int64, err error) {
	c := run.q.c
	c.commands.Add(1)
	now := time.Since(c.since)
	if run.req.kind <= blkOut && run.req.cost == 0 {
		run.Took(&run.r, c.disk, now-run.begun)
	}
	done := serving.RequestEvent{Client: c.client.Name(), Op: run.kind,
		Duration: now - run.req.arrived}
	switch {
	case err == nil:
		done.Bytes = n
		if run.kind == serving.OpRead {
			c.bytesRead.Add(uint64(n))
		} else {
			c.bytesWritten.Add(uint64(n))
		}
	case err == errRange, err == errUnsupported, err == errReadOnly:
		done.Status = serving.StatusFailed
	}
	c.srv.disks.Done(c.disk, done, err)
}

var (
	errStatus = errors.New("a request has no place for its status")
	errHeader = errors.New("a request has no header")
)
