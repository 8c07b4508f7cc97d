package target

import (
	"encoding/binary"
	"sync"
	"sync/atomic"

	"kubevirt.io/disk/target/internal/pdu"
)

const (
	// maxQueued is how many bytes may wait for the network, per connection, before whoever adds
	// more writes it out or waits for the one who is writing.
	maxQueued = 512 << 10

	// flushAt is how many of them the reader lets wait while it has more commands in hand: half of
	// depth 32 with 4 KiB, so that the initiator has work while the other half is read.
	flushAt = 64 << 10

	// ackedShare and ackedCost are what an acknowledged write weighs of its bytes, and besides: a
	// stream of small writes is acknowledged sixteen at a time, so that the initiator has work
	// while the next ones are done, and one of 256 KiB writes four at a time.
	ackedShare = 15
	ackedCost  = 4 << 10

	// pduCost is what a PDU counts for besides its data, so that those without data have a limit,
	// too. Bytes.
	pduCost = 128

	// placeCost is what a place in the queue counts for in the limit of memory, used or not, and
	// iovCost one in the list of what a system call writes, here and as the socket has it. Bytes.
	placeCost = pduCost
	iovCost   = 24 + 16

	// maxKept is how many PDUs the room that a connection keeps for its queue may hold.
	maxKept = 256

	offStatSN   = 24
	offExpCmdSN = 28
	offMaxCmdSN = 32
)

// snKind says what a PDU does with StatSN.
type snKind uint8

const (
	snAdvance snKind = iota // carries a StatSN of its own
	snPeek                  // carries the next StatSN and leaves it (R2T, unsolicited NOP-In)
	snNone                  // carries none (Data-In without status)
)

// outgoing is one PDU on its way to the network.
type outgoing struct {
	hdr     [pdu.HeaderLen + digestLen]byte
	tail    [3 + digestLen]byte // padding and data digest
	data    []byte
	release *buffer // freed once the PDU is written; only the last PDU of a buffer carries it
	sn      snKind
}

// sender queues PDUs and writes them: one writer at a time, and everything that is queued in one
// system call. There is no goroutine for it; whoever finishes a response writes when nobody else
// does.
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
	// guarded by mu; in queue and in the batch being written, with pduCost for each PDU
	bytes int
	// guarded by mu; the weight of the writes that the responses in queue acknowledge
	acked   int
	places  int   // guarded by mu; in queue, in the batch being written, and in spare
	closed  bool  // guarded by mu; no room is kept any more
	writing bool  // guarded by mu; whoever set it owns the fields below
	err     error // guarded by mu; the first write error, after which nothing is sent

	spare  []outgoing
	iov    [][]byte
	iovCap int // places in iov that are counted
	statSN uint32

	// writeSince is when the write in progress began, on the server's coarse clock; 0: none. wrote
	// is when the last one ended.
	writeSince, wrote atomic.Int64
	clock             *atomic.Int64
}

func (s *sender) init(to wire, clock *atomic.Int64, w *window, pool *buffers) {
	s.wire, s.clock, s.sess, s.pool = to, clock, w, pool
	s.drained.L = &s.mu
}

// put queues one PDU. It never blocks and never writes: flush does. The caller may hold session.mu.
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

// countLocked counts room for so many more PDUs.
func (s *sender) countLocked(places int) {
	s.places += places
	s.pool.charge(int64(places) * placeCost)
}

// close writes what is queued, as far as it still can be, and keeps no room for more.
func (s *sender) close() {
	_ = s.flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if !s.writing {
		s.shrinkLocked()
	}
}

// trim gives back the room for PDUs, if none is on its way.
func (s *sender) trim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.writing {
		s.shrinkLocked()
	}
}

// shrinkLocked gives back the room for PDUs that is not used. The caller owns the write side, or
// nobody does.
func (s *sender) shrinkLocked() {
	if len(s.queue) > 0 {
		return
	}
	s.countLocked(-cap(s.queue) - cap(s.spare))
	s.queue, s.spare = nil, nil
	s.keepIov(nil)
	s.wire.trim()
}

// keepIov keeps and counts the room for what a system call writes. The caller owns the write side.
func (s *sender) keepIov(iov [][]byte) {
	s.iov = iov
	if n := cap(iov); n != s.iovCap {
		s.pool.charge(int64(n-s.iovCap) * iovCost)
		s.iovCap = n
	}
}

type encoder interface{ Encode(*pdu.Header) }

// send queues p. data is its data segment, release the buffer that it lies in, if it is to be freed
// then.
func (s *sender) send(p encoder, sn snKind, data []byte, release *buffer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.put(sn, data, release)
	p.Encode((*pdu.Header)(o.hdr[:pdu.HeaderLen]))
}

// respond is send for the response that every command without Data-In has: as its type is known, it
// costs no allocation. acks is how many bytes of a write it acknowledges. It returns the weight of
// the queue.
func (s *sender) respond(p *pdu.SCSIResponse, acks int64, data []byte, release *buffer) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.Encode((*pdu.Header)(s.put(snAdvance, data, release).hdr[:pdu.HeaderLen]))
	if acks > 0 {
		s.acked += int(acks/ackedShare) + ackedCost
	}
	return s.weightLocked()
}

// weightLocked says how much it matters that the queue is written: the bytes that wait for the
// network, and the weight of the writes whose acknowledgement waits.
func (s *sender) weightLocked() int { return s.bytes + s.acked }

// flush writes all that is queued. If another goroutine is writing it leaves the work to that one,
// and waits only if too much has piled up. A peer that does not read therefore stops being served,
// and costs no more memory than the queue's limit and the command in hand.
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

// relieve is flush where much is queued, or there is no memory for more.
func (s *sender) relieve() error {
	s.mu.Lock()
	queued := s.bytes
	s.mu.Unlock()
	if queued < flushAt && !s.pool.exhausted() {
		return nil
	}
	return s.flush()
}

// writeLocked writes one batch and frees it, also where writing panics: then nobody knows how much
// of it went out, and nothing can follow.
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

// writeUnlocked is write without the lock, which is held again afterwards.
func (s *sender) writeUnlocked(batch []outgoing) error {
	s.mu.Unlock()
	defer s.mu.Lock()
	return s.write(batch)
}

// freeLocked gives back what a batch held.
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

// drain writes all that is queued and returns when it is written, whoever writes it.
func (s *sender) drain() {
	_ = s.flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.writing {
		s.drained.Wait()
	}
}

// write sends one batch, mostly in one system call. What many goroutines have queued at once goes
// out in parts: the time that a peer has to read is that of a part, so that a slow one that does
// read is not taken for one that does not. The caller owns the write side.
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

// idle says that nothing is queued or being written.
func (s *sender) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.writing && len(s.queue) == 0
}

// setDigests turns digests on for what is sent from now on. Nothing is queued when login ends.
func (s *sender) setDigests(header, data bool) { s.headerDigest, s.dataDigest = header, data }
