package socket

import (
	"errors"
	"sync"
	"sync/atomic"

	"kubevirt.io/disk/internal/memory"
)

const (
	// MaxQueued is how many bytes may wait for the network on each connection. A goroutine that
	// adds more must write them or wait for the writer.
	MaxQueued = 512 << 10

	// FlushAt is the weight of messages that a reader leaves in the queue while it has more
	// requests: half of depth 32 with 4 KiB, so that the peer has work while we read the other
	// half.
	FlushAt = 64 << 10

	// ackedShare and ackedCost are the weight of an acknowledged write: its bytes divided by
	// ackedShare, plus ackedCost. So small writes are acknowledged sixteen at a time, and writes of
	// 256 KiB four at a time, and the peer has work while the next ones are executed.
	ackedShare = 15
	ackedCost  = 4 << 10

	// MessageCost is how many bytes a message counts for in addition to its data, so that messages
	// without data have a limit, too.
	MessageCost = 128

	// placeCost is how many bytes a place in the queue counts for in the limit of memory, used or
	// not. iovCost is the same for a place in the list of buffers for a system call, here and in
	// the Socket.
	placeCost = MessageCost
	iovCost   = 24 + 16

	// maxKept is the largest queue, in messages, whose memory a connection keeps.
	maxKept = 256
)

// ErrPanic says that a write has panicked, so it is unknown how much was sent.
var ErrPanic = errors.New("internal error")

// Message is one queued message: a head of its protocol, and data.
type Message[H any] struct {
	Head    H
	Data    []byte
	Release *memory.Buffer // freed after the write; only the last message of a buffer has it
}

// Sender queues messages and writes them, without a goroutine of its own. The goroutine that has
// finished a request puts its answer into the queue and calls Flush:
//
//   - If nobody writes, it becomes the writer: it sets writing, takes the whole queue as its batch,
//     leaves spare in its place, and writes the batch without the lock. It goes on until the queue
//     is empty, so it also sends what others put there meanwhile. Only the writer uses spare, iov
//     and iovCap, and calls Gather.
//   - If another one writes, that one will send it. A goroutine that finds more than MaxQueued
//     bytes waits at drained. That delays only the work for a peer that does not read.
//   - After the first err, the writer frees batches and sends nothing.
type Sender[H any] struct {
	// Set before the first message; the Wire may be replaced while nothing is written.

	Wire  Wire
	Pool  *memory.Pool
	Clock func() int64
	// Gather appends the parts of messages, in order, to a list of buffers for a system call.
	Gather func(iov [][]byte, batch []Message[H]) [][]byte

	// WriteSince is when the current write began, by the Clock; 0: none. Wrote is when the last one
	// ended.
	WriteSince, Wrote atomic.Int64

	mu      sync.Mutex
	drained sync.Cond    // signalled when a batch has been written, and at the end of the last
	queue   []Message[H] // guarded by mu
	// guarded by mu; in the queue and the present batch, with MessageCost for each message
	bytes int
	// guarded by mu; the weight of the writes that messages in the queue acknowledge
	acked   int
	places  int   // guarded by mu; in queue, the present batch, and spare
	closed  bool  // guarded by mu; no memory is kept any more
	writing bool  // guarded by mu; the goroutine that set it owns the fields below
	err     error // guarded by mu; the first write error, after which nothing is sent

	spare  []Message[H]
	iov    [][]byte
	iovCap int // places in iov that are counted
}

// Lock keeps others from queueing messages: messages until Unlock follow each other on the wire.
func (s *Sender[H]) Lock() { s.mu.Lock() }

// Unlock ends Lock.
func (s *Sender[H]) Unlock() { s.mu.Unlock() }

// PutLocked queues a message. The caller fills in its head, which may have an earlier message's
// content. It never blocks and never writes; Flush does. The caller has called Lock.
func (s *Sender[H]) PutLocked(data []byte, release *memory.Buffer) *H {
	n := len(s.queue)
	if n < cap(s.queue) {
		s.queue = s.queue[:n+1]
	} else {
		s.queue = append(s.queue, Message[H]{})
		s.countLocked(cap(s.queue) - n)
	}
	m := &s.queue[n]
	m.Data, m.Release = data, release
	s.bytes += len(data) + MessageCost
	return &m.Head
}

// AckLocked notes that a message in the queue acknowledges a write of that many bytes.
func (s *Sender[H]) AckLocked(length int64) { s.acked += int(length/ackedShare) + ackedCost }

// WeightLocked returns the weight of the queue, which says how urgent a flush is: the queued bytes,
// plus the weight of the writes that queued messages acknowledge.
func (s *Sender[H]) WeightLocked() int { return s.bytes + s.acked }

// Weight is WeightLocked for a caller that has not called Lock.
func (s *Sender[H]) Weight() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.WeightLocked()
}

// Queued is how many bytes are in the queue and in the present batch, with MessageCost for each
// message.
func (s *Sender[H]) Queued() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes
}

// Kept is how many bytes of the limit of memory count for later messages.
func (s *Sender[H]) Kept() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := int64(s.places) * placeCost
	if !s.writing { // otherwise the writer uses it
		kept += int64(s.iovCap) * iovCost
	}
	return kept
}

// countLocked counts the memory for that many more messages.
func (s *Sender[H]) countLocked(places int) {
	s.places += places
	s.Pool.Charge(int64(places) * placeCost)
}

// Close writes the queue as far as possible, and gives its memory back.
func (s *Sender[H]) Close() {
	_ = s.Flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if !s.writing {
		s.shrinkLocked()
	}
}

// Trim gives back the memory for messages if none is queued or being written.
func (s *Sender[H]) Trim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.writing {
		s.shrinkLocked()
	}
}

// shrinkLocked releases unused memory for messages. The caller owns the write side, or nobody does.
func (s *Sender[H]) shrinkLocked() {
	if len(s.queue) > 0 {
		return
	}
	s.countLocked(-cap(s.queue) - cap(s.spare))
	s.queue, s.spare = nil, nil
	s.keepIov(nil)
	s.Wire.Trim()
}

// keepIov keeps and counts the list of buffers for a system call. The caller owns the write side.
func (s *Sender[H]) keepIov(iov [][]byte) {
	s.iov = iov
	if n := cap(iov); n != s.iovCap {
		s.Pool.Charge(int64(n-s.iovCap) * iovCost)
		s.iovCap = n
	}
}

// Flush writes everything queued. If another goroutine is writing, Flush leaves the work to it, and
// waits only if too much is queued. So a peer that does not read is not served any more, and costs
// at most the queue's limit and the request in hand.
func (s *Sender[H]) Flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writing {
		s.awaitLocked(func() bool { return s.bytes <= MaxQueued })
		if s.writing {
			return s.err
		}
	}
	if len(s.queue) == 0 {
		return s.err
	}
	s.writing = true
	defer s.doneLocked()
	s.writeAllLocked()
	return s.err
}

// FlushElse is Flush for a goroutine that must not wait for the peer. It calls handOn, once, before
// it waits, so that another goroutine can do urgent work, and reports whether it did. For a Wire
// that is no Socket, it is unknown whether it will wait.
func (s *Sender[H]) FlushElse(handOn func()) (handedOn bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writing || len(s.queue) == 0 {
		return false
	}
	s.writing = true
	defer s.doneLocked()
	w, ok := s.Wire.(*Socket)
	if !ok {
		handOn()
		s.writeAllLocked()
		return true
	}
	w.beforeWait = handOn
	s.writeAllLocked()
	handedOn = w.beforeWait == nil
	w.beforeWait = nil
	return handedOn
}

// writeAllLocked writes the queue until it is empty. The caller owns the write side.
func (s *Sender[H]) writeAllLocked() {
	for len(s.queue) > 0 {
		batch := s.queue
		s.queue = s.spare[:0]
		s.spare = nil
		s.acked = 0
		s.writeLocked(batch)
	}
}

// awaitLocked waits until nobody writes, or enough is true.
func (s *Sender[H]) awaitLocked(enough func() bool) {
	s.drained.L = &s.mu
	for s.writing && !enough() {
		s.drained.Wait()
	}
}

// Relieve calls Flush if at least that many bytes are queued, or memory is exhausted.
func (s *Sender[H]) Relieve(at int) error {
	if s.Queued() < at && !s.Pool.Exhausted() {
		return nil
	}
	return s.Flush()
}

// writeLocked writes one batch and frees it, even if the write panics. Then it is unknown how much
// was sent, so nothing more is sent.
func (s *Sender[H]) writeLocked(batch []Message[H]) {
	defer s.freeLocked(batch)
	if s.err != nil {
		return
	}
	err := ErrPanic
	defer func() {
		if s.err == nil {
			s.err = err
		}
	}()
	err = s.writeUnlocked(batch)
}

// writeUnlocked releases the lock, calls write, and takes the lock again.
func (s *Sender[H]) writeUnlocked(batch []Message[H]) error {
	s.mu.Unlock()
	defer s.mu.Lock()
	return s.write(batch)
}

// freeLocked gives back the memory of a batch.
func (s *Sender[H]) freeLocked(batch []Message[H]) {
	for i := range batch {
		s.bytes -= len(batch[i].Data) + MessageCost
		batch[i].Release.Release()
		batch[i].Data, batch[i].Release = nil, nil
	}
	if cap(batch) <= maxKept && !s.closed {
		s.spare = batch[:0]
	} else {
		s.countLocked(-cap(batch))
	}
	s.drained.Broadcast()
}

// doneLocked ends the writer's turn.
func (s *Sender[H]) doneLocked() {
	s.writing = false
	if s.closed {
		s.shrinkLocked()
	}
	s.drained.Broadcast()
}

// Drain returns when everything queued was written, by any goroutine.
func (s *Sender[H]) Drain() {
	_ = s.Flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaitLocked(func() bool { return false })
}

// Idle reports that nothing is queued or being written.
func (s *Sender[H]) Idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.writing && len(s.queue) == 0
}

// write sends one batch, mostly in one system call. It sends a large batch in parts. The peer's
// time limit is for each part, so that a slow peer is not taken for one that does not read. The
// caller owns the write side.
func (s *Sender[H]) write(batch []Message[H]) error {
	for len(batch) > 0 {
		n := 0
		for bytes := 0; n < len(batch) && bytes < MaxQueued; n++ {
			bytes += len(batch[n].Data) + MessageCost
		}
		if err := s.writePart(batch[:n]); err != nil {
			return err
		}
		batch = batch[n:]
	}
	return nil
}

// writePart sends messages in one system call.
func (s *Sender[H]) writePart(batch []Message[H]) error {
	s.WriteSince.Store(s.Clock())
	s.keepIov(s.Gather(s.iov[:0], batch))
	err := s.Wire.Writev(s.iov)
	clear(s.iov) // the buffers go back to the pool
	if cap(s.iov) > 3*maxKept {
		s.keepIov(nil)
	}
	s.Wrote.Store(s.Clock())
	s.WriteSince.Store(0)
	return err
}
