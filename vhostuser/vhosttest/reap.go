package vhosttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"
)

// Pending is a chain that the device has. It ends when the device gives it back.
type Pending struct {
	q       *Queue
	heads   []uint16 // its descriptors in the ring; the first is the head
	room    uint64   // what the device may write, bytes
	buffers []Buffer // freed with it; the first is the table of an indirect chain
	done    chan struct{}

	written uint32 // what the device says it wrote
	err     error
}

func (p *Pending) finish(written uint32, err error) {
	p.written, p.err = written, err
	close(p.done)
}

// Head is the descriptor that the chain begins with.
func (p *Pending) Head() uint16 { return p.heads[0] }

// Wait waits for the device, and returns how many bytes it says it wrote.
func (p *Pending) Wait() (written uint32, err error) {
	select {
	case <-p.done:
		return p.written, p.err
	case <-time.After(p.q.d.o.Timeout):
		return 0, fmt.Errorf("%w: queue %d, head %d", ErrTimeout, p.q.Index, p.heads[0])
	}
}

// startReaperLocked starts what waits for the device's calls, unless it runs.
func (q *Queue) startReaperLocked() {
	if q.reaper == nil && q.err == nil {
		q.reaper, q.stopping = make(chan struct{}), false
		go q.reap(q.reaper)
	}
}

// stopReaper ends it. Whatever the device gave back is taken at the next start.
func (q *Queue) stopReaper() {
	q.mu.Lock()
	reaper := q.reaper
	q.stopping = true
	q.mu.Unlock()
	if reaper != nil {
		_ = signal(q.callFD)
		<-reaper
	}
	q.mu.Lock()
	q.reaper = nil
	q.mu.Unlock()
}

// reap is the guest's interrupt handler. It takes what the device gives back, until it is stopped
// or the device breaks the ring.
func (q *Queue) reap(done chan struct{}) {
	defer close(done)
	for {
		stop := false
		err := q.locked(func() error {
			stop = q.stopping
			return q.reapLocked()
		})
		if err == nil && !stop {
			err = q.waitCall()
		}
		if err != nil {
			q.mu.Lock()
			q.failLocked(err)
			q.mu.Unlock()
			return
		}
		if stop {
			return
		}
	}
}

// locked does something under the lock.
func (q *Queue) locked(do func() error) (err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	defer guard(&err)()
	return do()
}

// guard makes an error of a fault: memory that a test has cut short is no reason for the process to
// die. Use it as `defer guard(&err)()`.
func guard(err *error) func() {
	before := debug.SetPanicOnFault(true)
	return func() {
		debug.SetPanicOnFault(before)
		switch fault := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			*err = fmt.Errorf("the guest's memory cannot be read: %v", fault)
		default:
			*err = fmt.Errorf("the driver has failed: %v\n%s", fault, debug.Stack())
		}
	}
}

// waitCall sleeps until the device calls, as a guest's processor does. Back ends may set
// O_NONBLOCK, which both sides of an eventfd share; libvhost-user does. It is taken away again, so
// that this is one system call.
func (q *Queue) waitCall() error {
	b := q.called[:]
	_, err := unix.Read(q.callFD, b)
	for ; err != nil; _, err = unix.Read(q.callFD, b) {
		if errors.Is(err, unix.EAGAIN) {
			err = unix.SetNonblock(q.callFD, false)
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for a call: %w", err)
		}
	}
	return nil
}

// reapLocked takes all that the device has given back, and asks it to call for the next.
func (q *Queue) reapLocked() error {
	begin := q.lastUsed
	for {
		index := q.UsedIndex()
		if n := int(index - q.lastUsed); n > q.waiting+q.byHand {
			return fmt.Errorf("%w: the used index of queue %d went from %d to %d, but the device "+
				"had %d requests", ErrViolation, q.Index, q.lastUsed, index, q.waiting+q.byHand)
		}
		for q.lastUsed != index {
			element := q.Used.Bytes[4+8*int(q.lastUsed%q.Size):]
			head, written := binary.LittleEndian.Uint32(element),
				binary.LittleEndian.Uint32(element[4:])
			q.lastUsed++
			if err := q.returnedLocked(head, written); err != nil {
				return err
			}
		}
		if q.d.Features&FeatureEventIndex == 0 {
			break
		}
		show(q.usedEvent, uint32(q.lastUsed)) // the device sees it, or the next index is seen here
		if q.UsedIndex() == q.lastUsed {
			break
		}
	}
	if q.lastUsed != begin {
		q.wakeLocked()
	}
	return nil
}

// returnedLocked takes one head.
func (q *Queue) returnedLocked(head, written uint32) error {
	q.returned.Add(1)
	if head >= uint32(q.Size) || q.pending[head] == nil {
		if q.byHand > 0 {
			q.byHand--
			return nil
		}
		return fmt.Errorf("%w: queue %d gives back head %d, which the device does not have",
			ErrViolation, q.Index, head)
	}
	p := q.pending[head]
	q.pending[head] = nil
	q.waiting--
	q.free = append(q.free, p.heads...)
	var err error
	if uint64(written) > p.room {
		err = fmt.Errorf("%w: the device says that it wrote %d bytes to a chain of %d",
			ErrViolation, written, p.room)
	}
	p.finish(written, err)
	return nil
}

// InFlight is how many requests the device has.
func (q *Queue) InFlight() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting + q.byHand
}
