package vhosttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"
)

// StreamOptions are equal requests, of which a number is always under way.
type StreamOptions struct {
	Write      bool
	Sequential bool // otherwise random
	Bytes      int  // of one request, a multiple of 512
	Depth      int
	Span       int64  // of the disk, from its beginning, bytes; 0: all of it
	Seed       uint64 // of the random addresses
	Indirect   bool   // chains in tables of their own, as Linux does it
}

// Totals are what a stream has done.
type Totals struct {
	Operations   uint64
	Kicks, Waits uint64 // system calls of the guest: it kicked, and waited for a call
	Elapsed      time.Duration
	Latency      Latencies
}

// Stream is a ring full of equal requests, to measure. It behaves as a guest with one processor: it
// takes what the device gave back, puts as much in, kicks if the device wants it, and sleeps in a
// read of the call's eventfd. It allocates nothing while it runs.
type Stream struct {
	q        *Queue
	o        StreamOptions
	places   uint64
	next     uint64 // of sequential requests
	random   uint64
	sectors  []*uint64 // in the headers
	status   [][]byte
	heads    []uint16
	slots    []uint16 // by head
	begun    []time.Duration
	buffers  []Buffer
	progress atomic.Uint64
	late     atomic.Bool
}

// Stream prepares a stream. The queue is for it alone until Close.
func (q *Queue) Stream(o StreamOptions) (_ *Stream, err error) {
	perSlot := 3
	if o.Indirect {
		perSlot = 1
	}
	switch {
	case o.Bytes < sectorSize || o.Bytes%sectorSize != 0:
		return nil, fmt.Errorf("requests of %d bytes", o.Bytes)
	case o.Depth < 1 || o.Depth*perSlot > int(q.Size):
		return nil, fmt.Errorf("depth %d in a ring of %d descriptors", o.Depth, q.Size)
	case q.InFlight() > 0:
		return nil, errors.New("the queue has requests under way")
	case o.Span == 0:
		c, err := q.d.Config()
		if err != nil {
			return nil, err
		}
		o.Span = int64(c.Capacity) * sectorSize
	}
	if o.Span < int64(o.Bytes) {
		return nil, fmt.Errorf("requests of %d bytes on a disk of %d", o.Bytes, o.Span)
	}
	q.stopReaper()
	s := &Stream{q: q, o: o, places: uint64(o.Span / int64(o.Bytes)),
		random: o.Seed ^ 88172645463325252, slots: make([]uint16, q.Size)}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	for slot := range o.Depth {
		if err := s.prepare(slot); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// alloc is room for a stream that Close gives back.
func (s *Stream) alloc(bytes, align int) (Buffer, error) {
	b, err := s.q.d.Memory.alloc(nil, bytes, align)
	if err == nil {
		s.buffers = append(s.buffers, b)
	}
	return b, err
}

// prepare makes the chain of a slot. Its descriptors never change.
func (s *Stream) prepare(slot int) error {
	header, err := s.alloc(16, 16)
	if err != nil {
		return err
	}
	data, err := s.alloc(s.o.Bytes, LogPage)
	if err != nil {
		return err
	}
	status, err := s.alloc(1, 16)
	if err != nil {
		return err
	}
	kind, inData := TypeRead, DescWrite
	if s.o.Write {
		kind, inData = TypeWrite, 0
		for i := range data.Bytes {
			data.Bytes[i] = byte(i*7 + slot)
		}
	}
	binary.LittleEndian.PutUint64(header.Bytes, uint64(kind))
	s.sectors = append(s.sectors, (*uint64)(unsafe.Pointer(&header.Bytes[8])))
	s.status = append(s.status, status.Bytes)
	table, first, head := s.q.Table.Bytes, uint16(3*slot), uint16(3*slot)
	if s.o.Indirect {
		b, err := s.alloc(3*descriptorLen, 16)
		if err != nil {
			return err
		}
		head = uint16(slot)
		s.q.SetDescriptor(head, Descriptor{Addr: b.Addr, Len: 3 * descriptorLen,
			Flags: DescIndirect})
		table, first = b.Bytes, 0
	}
	for i, x := range []Descriptor{
		{header.Addr, uint32(len(header.Bytes)), DescNext, first + 1},
		{data.Addr, uint32(s.o.Bytes), DescNext | inData, first + 2},
		{status.Addr, 1, DescWrite, 0},
	} {
		x.Put(table[descriptorLen*(int(first)+i):])
	}
	s.heads, s.begun = append(s.heads, head), append(s.begun, 0)
	s.slots[head] = uint16(slot)
	return nil
}

// Close gives the memory back. The queue can be used for something else then.
func (s *Stream) Close() { s.q.d.Memory.Free(s.buffers...) }

// add puts the request of a slot into the ring.
func (s *Stream) add(slot uint16, now time.Duration) {
	place := s.next
	if s.o.Sequential {
		if s.next++; s.next == s.places {
			s.next = 0
		}
	} else {
		s.random ^= s.random << 13
		s.random ^= s.random >> 7
		s.random ^= s.random << 17
		place = s.random % s.places
	}
	*s.sectors[slot] = place * uint64(s.o.Bytes/sectorSize)
	s.status[slot][0] = statusNone
	s.begun[slot] = now
	s.q.pushLocked(s.heads[slot])
}

// Run keeps the depth for a time, and then waits until all requests have ended. It stays on one
// thread of the operating system.
func (s *Stream) Run(length time.Duration) (t Totals, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	q := s.q
	q.mu.Lock()
	defer q.mu.Unlock()
	stop := s.watch()
	defer stop()
	begin := time.Now()
	for slot := range s.heads {
		s.add(uint16(slot), 0)
	}
	inFlight := len(s.heads)
	if err := s.publish(&t); err != nil {
		return t, err
	}
	for inFlight > 0 {
		if err := s.wait(&t); err != nil {
			return t, err
		}
		s.progress.Add(1)
		now := time.Since(begin)
		more := now < length
		index, added := q.UsedIndex(), false
		if int(index-q.lastUsed) > inFlight {
			return t, fmt.Errorf("%w: the used index went from %d to %d with %d requests",
				ErrViolation, q.lastUsed, index, inFlight)
		}
		for ; q.lastUsed != index; q.lastUsed++ {
			head := binary.LittleEndian.Uint32(q.Used.Bytes[4+8*int(q.lastUsed%q.Size):])
			if head >= uint32(q.Size) {
				return t, fmt.Errorf("%w: head %d was given back", ErrViolation, head)
			}
			slot := s.slots[head]
			if status := s.status[slot][0]; status != StatusOK {
				return t, &StatusError{Sector: *s.sectors[slot], Status: status}
			}
			t.Latency.add(now - s.begun[slot])
			t.Operations++
			if more {
				s.add(slot, now)
				added = true
			} else {
				inFlight--
			}
		}
		if !added {
			continue
		}
		if err := s.publish(&t); err != nil {
			return t, err
		}
	}
	t.Elapsed = time.Since(begin)
	return t, nil
}

// publish shows the device what was added, and kicks it if it wants that.
func (s *Stream) publish(t *Totals) error {
	if !s.q.publishLocked() {
		return nil
	}
	t.Kicks++
	return signal(s.q.kickFD)
}

// wait sleeps until the device has given something back.
func (s *Stream) wait(t *Totals) error {
	q := s.q
	if q.UsedIndex() != q.lastUsed {
		return nil
	}
	if q.d.Features&FeatureEventIndex != 0 {
		show(q.usedEvent, uint32(q.lastUsed)) // the device sees it, or its index is seen below
	}
	for q.UsedIndex() == q.lastUsed {
		t.Waits++
		if err := q.waitCall(); err != nil {
			return err
		}
		if s.late.Load() {
			return fmt.Errorf("%w: queue %d, %d requests have ended; %s", ErrTimeout, q.Index,
				t.Operations, q.state())
		}
	}
	return nil
}

// watch wakes a stream that waits for too long. It allocates before the stream runs.
func (s *Stream) watch() (stop func()) {
	s.late.Store(false)
	ticker, done, ended := time.NewTicker(s.q.d.o.Timeout), make(chan struct{}),
		make(chan struct{})
	go func() {
		defer close(ended)
		for last := s.progress.Load(); ; last = s.progress.Load() {
			select {
			case <-done:
				return
			case <-ticker.C:
			}
			if s.progress.Load() == last {
				s.late.Store(true)
				_ = signal(s.q.callFD)
			}
		}
	}()
	return func() {
		ticker.Stop()
		close(done)
		<-ended
	}
}

// Latencies counts how long requests took, in steps of at most 1/16.
type Latencies struct {
	counts [64 * 16]uint64
	sum    time.Duration
	n      uint64
}

// step is the first nanosecond of a step.
func step(i int) uint64 {
	if i < 16 {
		return uint64(i)
	}
	return (16 + uint64(i%16)) << (i/16 - 1)
}

func (l *Latencies) add(d time.Duration) {
	ns := uint64(max(d, 0))
	i := int(ns)
	if ns >= 16 {
		shift := bits.Len64(ns) - 5
		i = (shift+1)*16 + int(ns>>shift) - 16
	}
	l.counts[i]++
	l.sum += d
	l.n++
}

// Add adds others.
func (l *Latencies) Add(o *Latencies) {
	for i, n := range o.counts {
		l.counts[i] += n
	}
	l.sum, l.n = l.sum+o.sum, l.n+o.n
}

// Mean is the mean.
func (l *Latencies) Mean() time.Duration {
	if l.n == 0 {
		return 0
	}
	return l.sum / time.Duration(l.n)
}

// Quantile is what a share of requests took at most, such as 0.99.
func (l *Latencies) Quantile(share float64) time.Duration {
	left := uint64(math.Ceil(share * float64(l.n)))
	for i, n := range l.counts {
		if n > 0 && n >= left {
			return time.Duration(step(i + 1))
		}
		left -= n
	}
	return 0
}
