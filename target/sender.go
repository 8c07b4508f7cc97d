package target

import (
	"encoding/binary"
	"sync"
	"sync/atomic"

	"kubevirt.io/disk/target/internal/pdu"
)

const (
	// maxQueued is how many bytes may wait for the network on each connection. A goroutine that
	// adds more must write them or wait for the writer.
	maxQueued = 512 << 10

	// flushAlone is how many of them the reader leaves in the queue while it has more commands:
	// half of depth 32 with 4 KiB, so that the initiator has work while the target reads the other
	// half. While other readers work, it is flushBeside: the processors have work anyway, and fewer
	// system calls cost less.
	flushAlone  = 64 << 10
	flushBeside = 256 << 10

	// ackedShare and ackedCost are the weight of an acknowledged write: its bytes divided by
	// ackedShare, plus ackedCost. So small writes are acknowledged sixteen at a time, and writes of
	// 256 KiB four at a time, and the initiator has work while the target does the next ones.
	ackedShare = 15
	ackedCost  = 4 << 10

	// pduCost is how many bytes a PDU counts for besides its data, so that PDUs without data have a
	// limit, too.
	pduCost = 128

	// placeCost is how many bytes a place in the queue counts for in the limit of memory, used or
	// not. iovCost is the same for a place in the list of buffers for a system call, here and in
	// the socket.
	placeCost = pduCost
	iovCost   = 24 + 16

	// maxKept is the largest queue, in PDUs, whose memory a connection keeps.
	maxKept = 256

	offStatSN   = 24
	offExpCmdSN = 28
	offMaxCmdSN = 32
)

// snKind is how a PDU uses StatSN.
type snKind uint8

const (
	snAdvance snKind = iota // carries a new StatSN
	snPeek                  // carries the next StatSN, but does not use it (R2T, own NOP-In)
	snNone                  // carries none (Data-In without status)
)

// outgoing is one queued PDU.
type outgoing struct {
	hdr     [pdu.HeaderLen + digestLen]byte
	tail    [3 + digestLen]byte // padding and data digest
	data    []byte
	release *buffer // freed after the write; only the last PDU of a buffer has it
	sn      snKind
}

// sender queues PDUs and writes them. There is one writer at a time, and it writes everything
// queued in one system call. It has no goroutine of its own: the goroutine that finishes a response
// writes, unless another one does already.
//
// Lock order: session.mu before sender.mu.
type sender struct {
	wire wire    // set before the first PDU of a session
	sess *window // numbers to stamp; set before the first PDU
	pool *buffers

	headerDigest, dataDigest bool

	mu      sync.Mutex
	drained sync.Cond  // signalled when a batch has been written, and at the end of the last
	queue   []outgoing // guarded by mu
	// guarded by mu; in the queue and the batch being written, with pduCost for each PDU
	bytes int
	// guarded by mu; the weight of the writes that responses in the queue acknowledge
	acked   int
	places  int   // guarded by mu; in queue, the batch being written, and spare
	closed  bool  // guarded by mu; no memory is kept any more
	writing bool  // guarded by mu; the goroutine that set it owns the fields below
	err     error // guarded by mu; the first write error, after which nothing is sent

	spare  []outgoing
	iov    [][]byte
	iovCap int // places in iov that are counted
	statSN uint32

	// writeSince is when the current write began, on the server's coarse clock; 0: none. wrote is
	// when the last one ended.
	writeSince, wrote atomic.Int64
	clock             *atomic.Int64
}

func (s *sender) init(to wire, clock *atomic.Int64, w *window, pool *buffers) {
	s.wire, s.clock, s.sess, s.pool = to, clock, w, pool
	s.drained.L = &s.mu
}

// put queues one PDU. It never blocks and never writes; flush does. The caller may hold session.mu.
func (s *sender) put(sn snKind, data []byte, release *buffer) *outgoing {
	n := len(s.queue)
	if n < cap(s.queue) {
		s.queue = s.queue[:n+1]
	} else {
		s.queue = append(s.queue, outgoing{})
		s.countLocked(cap(s.queue) - n)
	}
	o := &s.queue[n]
	o.sn, o.data, o.release = sn, data, release
	s.bytes += len(data) + pduCost
	return o
}

// countLocked counts the memory for that many more PDUs.
func (s *sender) countLocked(places int) {
	s.places += places
	s.pool.charge(int64(places) * placeCost)
}

// close writes the queue as far as possible, and gives its memory back.
func (s *sender) close() {
	_ = s.flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if !s.writing {
		s.shrinkLocked()
	}
}

// trim gives back the memory for PDUs if none is queued or being written.
func (s *sender) trim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.writing {
		s.shrinkLocked()
	}
}

// shrinkLocked gives back unused memory for PDUs. The caller owns the write side, or nobody does.
func (s *sender) shrinkLocked() {
	if len(s.queue) > 0 {
		return
	}
	s.countLocked(-cap(s.queue) - cap(s.spare))
	s.queue, s.spare = nil, nil
	s.keepIov(nil)
	s.wire.trim()
}

// keepIov keeps and counts the list of buffers for a system call. The caller owns the write side.
func (s *sender) keepIov(iov [][]byte) {
	s.iov = iov
	if n := cap(iov); n != s.iovCap {
		s.pool.charge(int64(n-s.iovCap) * iovCost)
		s.iovCap = n
	}
}

type encoder interface{ Encode(*pdu.Header) }

// send queues p. data is its data segment. release is the buffer to free after the write, or nil.
func (s *sender) send(p encoder, sn snKind, data []byte, release *buffer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.put(sn, data, release)
	p.Encode((*pdu.Header)(o.hdr[:pdu.HeaderLen]))
}

// respond is send for a SCSI Response. As its type is known, it allocates nothing. acks is the
// number of bytes of the write that it acknowledges. It returns the weight of the queue.
func (s *sender) respond(p *pdu.SCSIResponse, acks int64, data []byte, release *buffer) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.Encode((*pdu.Header)(s.put(snAdvance, data, release).hdr[:pdu.HeaderLen]))
	if acks > 0 {
		s.acked += int(acks/ackedShare) + ackedCost
	}
	return s.weightLocked()
}

// weightLocked returns the weight of the queue, which tells how urgent a flush is: the queued
// bytes, plus the weight of the writes that queued responses acknowledge.
func (s *sender) weightLocked() int { return s.bytes + s.acked }

// flush writes everything queued. If another goroutine is writing, flush leaves the work to that
// one, and waits only if too much is queued. So a peer that does not read is served no more, and
// costs at most the queue's limit and the command in hand.
func (s *sender) flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writing {
		for s.writing && s.bytes > maxQueued {
			s.drained.Wait()
		}
		if s.writing {
			return s.err
		}
	}
	if len(s.queue) == 0 {
		return s.err
	}
	s.writing = true
	defer s.doneLocked()
	for len(s.queue) > 0 {
		batch := s.queue
		s.queue = s.spare[:0]
		s.spare = nil
		s.acked = 0
		s.writeLocked(batch)
	}
	return s.err
}

// relieve calls flush if at least that many bytes are queued, or memory is exhausted.
func (s *sender) relieve(at int) error {
	s.mu.Lock()
	queued := s.bytes
	s.mu.Unlock()
	if queued < at && !s.pool.exhausted() {
		return nil
	}
	return s.flush()
}

// writeLocked writes one batch and frees it, even if the write panics. Then nobody knows how much
// went out, so nothing more is sent.
func (s *sender) writeLocked(batch []outgoing) {
	defer s.freeLocked(batch)
	if s.err != nil {
		return
	}
	err := errPanic
	defer func() {
		if s.err == nil {
			s.err = err
		}
	}()
	err = s.writeUnlocked(batch)
}

// writeUnlocked releases the lock, calls write, and takes the lock again.
func (s *sender) writeUnlocked(batch []outgoing) error {
	s.mu.Unlock()
	defer s.mu.Lock()
	return s.write(batch)
}

// freeLocked gives back the memory of a batch.
func (s *sender) freeLocked(batch []outgoing) {
	for i := range batch {
		s.bytes -= len(batch[i].data) + pduCost
		batch[i].release.release()
		batch[i].data, batch[i].release = nil, nil
	}
	if cap(batch) <= maxKept && !s.closed {
		s.spare = batch[:0]
	} else {
		s.countLocked(-cap(batch))
	}
	s.drained.Broadcast()
}

// doneLocked ends the writer's turn.
func (s *sender) doneLocked() {
	s.writing = false
	if s.closed {
		s.shrinkLocked()
	}
	s.drained.Broadcast()
}

// drain returns when everything queued is written, by whichever goroutine.
func (s *sender) drain() {
	_ = s.flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.writing {
		s.drained.Wait()
	}
}

// write sends one batch, mostly in one system call. It sends a large batch in parts. The peer has
// the time limit for each part, so that a slow peer is not taken for one that does not read. The
// caller owns the write side.
func (s *sender) write(batch []outgoing) error {
	for len(batch) > 0 {
		n := 0
		for bytes := 0; n < len(batch) && bytes < maxQueued; n++ {
			bytes += len(batch[n].data) + pduCost
		}
		if err := s.writePart(batch[:n]); err != nil {
			return err
		}
		batch = batch[n:]
	}
	return nil
}

// writePart stamps, digests and sends PDUs in one system call.
func (s *sender) writePart(batch []outgoing) error {
	s.writeSince.Store(s.clock.Load())
	iov := s.iov[:0]
	expCmdSN, maxCmdSN := s.sess.numbers()
	s.sess.told.Store(maxCmdSN)
	for i := range batch {
		o := &batch[i]
		h := o.hdr[:pdu.HeaderLen]
		if o.sn != snNone {
			binary.BigEndian.PutUint32(h[offStatSN:], s.statSN)
			if o.sn == snAdvance {
				s.statSN++
			}
		}
		binary.BigEndian.PutUint32(h[offExpCmdSN:], expCmdSN)
		binary.BigEndian.PutUint32(h[offMaxCmdSN:], maxCmdSN)
		if s.headerDigest {
			pdu.PutDigest(o.hdr[pdu.HeaderLen:], pdu.Digest(h))
			h = o.hdr[:]
		}
		iov = append(iov, h)
		if len(o.data) == 0 {
			continue
		}
		iov = append(iov, o.data)
		pad := -len(o.data) & 3
		tail := o.tail[:pad]
		clear(tail)
		if s.dataDigest {
			tail = o.tail[:pad+digestLen]
			pdu.PutDigest(tail[pad:], pdu.Digest(o.data, tail[:pad]))
		}
		if len(tail) > 0 {
			iov = append(iov, tail)
		}
	}
	s.keepIov(iov)
	err := s.wire.writev(iov)
	clear(s.iov) // the buffers go back to the pool
	if cap(s.iov) > 3*maxKept {
		s.keepIov(nil)
	}
	s.wrote.Store(s.clock.Load())
	s.writeSince.Store(0)
	return err
}

// idle reports that nothing is queued or being written.
func (s *sender) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.writing && len(s.queue) == 0
}

// setDigests turns digests on for all PDUs from now on. Nothing is queued when login ends.
func (s *sender) setDigests(header, data bool) { s.headerDigest, s.dataDigest = header, data }
