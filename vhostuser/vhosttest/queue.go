package vhosttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of a descriptor (virtio 1.2, section 2.7.5).
const (
	DescNext     uint16 = 1
	DescWrite    uint16 = 2 // the device writes
	DescIndirect uint16 = 4
)

// Descriptor is one entry of a table of descriptors.
type Descriptor struct {
	Addr  uint64 // in the guest
	Len   uint32
	Flags uint16
	Next  uint16
}

const descriptorLen = 16

// Part is what one descriptor of a chain says. The chain itself is made by the queue.
type Part struct {
	Addr  uint64 // in the guest
	Len   uint32
	Write bool // the device writes
}

// Queue is one split ring. Add, Publish and Submit are for chains that are well formed, whatever
// they say. To lie about the ring itself there are SetDescriptor, Push, SetAvailIndex and Kick;
// what a device says it used of heads that were pushed by hand is only counted.
type Queue struct {
	Index int
	Size  uint16

	Table, Avail, Used Buffer // its parts in the guest's memory

	d                     *Driver
	availHead, usedHead   *uint32 // flags, and the index in the upper half
	usedEvent, availEvent *uint32 // in the lower half
	kickFD, callFD, errFD int
	called                [8]byte       // read from callFD
	returned              atomic.Uint64 // how many heads came back

	mu        sync.Mutex // guards what follows
	next      uint16     // avail index of the next head
	published uint16     // what the device sees
	lastUsed  uint16
	free      []uint16
	pending   []*Pending // by head
	byHand    int        // heads that were pushed by hand and have not come back
	waiting   int        // pending that are not nil
	changed   chan struct{}
	err       error // the device broke the ring, or the driver was closed
	reaper    chan struct{}
	stopping  bool
}

func newQueue(d *Driver, index int, size uint16) (_ *Queue, err error) {
	q := &Queue{Index: index, Size: size, d: d, kickFD: -1, callFD: -1, errFD: -1,
		pending: make([]*Pending, size), changed: make(chan struct{})}
	defer func() {
		if err != nil {
			q.close()
		}
	}()
	n := int(size)
	first := d.Memory.Regions()[0]
	for _, part := range []struct {
		b            *Buffer
		bytes, align int
	}{{&q.Table, descriptorLen * n, 16}, {&q.Avail, 8 + 2*n, 4}, {&q.Used, 8 + 8*n, 4}} {
		if *part.b, err = d.Memory.alloc(first, part.bytes, part.align); err != nil {
			return nil, err
		}
	}
	q.bind()
	for _, fd := range []*int{&q.kickFD, &q.callFD, &q.errFD} {
		if *fd, err = eventfd(); err != nil {
			return nil, fmt.Errorf("an eventfd: %w", err)
		}
	}
	q.reset()
	return q, nil
}

// bind finds the words of the ring in memory.
func (q *Queue) bind() {
	word := func(b Buffer, at int) *uint32 {
		return (*uint32)(unsafe.Pointer(&b.Bytes[at]))
	}
	q.availHead, q.usedEvent = word(q.Avail, 0), word(q.Avail, 4+2*int(q.Size))
	q.usedHead, q.availEvent = word(q.Used, 0), word(q.Used, 4+8*int(q.Size))
}

// reset empties the ring, as a driver does after a reset of the device.
func (q *Queue) reset() {
	q.stopReaper()
	q.mu.Lock()
	defer q.mu.Unlock()
	clear(q.Table.Bytes)
	clear(q.Avail.Bytes)
	clear(q.Used.Bytes)
	q.next, q.published, q.lastUsed, q.byHand, q.err = 0, 0, 0, 0, nil
	q.failLocked(errors.New("the device was reset"))
	q.err = nil
	q.free = q.free[:0]
	for i := range q.Size {
		q.free = append(q.free, q.Size-1-i)
	}
}

func (q *Queue) close() {
	q.stopReaper()
	q.mu.Lock()
	q.failLocked(errors.New("the driver was closed"))
	q.mu.Unlock()
	for _, fd := range []int{q.kickFD, q.callFD, q.errFD} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// failLocked ends all requests with an error.
func (q *Queue) failLocked(err error) {
	q.err = err
	for head, p := range q.pending {
		if p != nil {
			q.pending[head] = nil
			p.finish(0, err)
		}
	}
	q.waiting = 0
	q.wakeLocked()
}

// wakeLocked tells those who wait that something has changed.
func (q *Queue) wakeLocked() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// base is where the ring goes on that nobody stopped: behind what came back, as QEMU has it.
func (q *Queue) base() uint16 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.UsedIndex()
}

// Resume gives the ring to the back end, from an index of the avail ring on. The back end finds a
// kick there, because QEMU makes the eventfd so (virtio_bus_set_host_notifier): whatever the guest
// has put into the ring is done without another one.
func (q *Queue) Resume(base uint16) error {
	c, i := q.d.Conn(), uint32(q.Index)
	if !q.d.o.Quiet {
		if err := signal(q.kickFD); err != nil {
			return err
		}
	}
	steps := []struct {
		request Request
		payload []byte
		fds     []int
	}{
		{SetVringCall, U64(uint64(i)), []int{q.callFD}}, // QEMU does it as soon as it connects
		{SetVringNum, U32(i, uint32(q.Size)), nil},
		{SetVringBase, U32(i, uint32(base)), nil},
		{SetVringAddr, q.address(), nil},
		{SetVringKick, U64(uint64(i)), []int{q.kickFD}},
		{SetVringErr, U64(uint64(i)), []int{q.errFD}},
	}
	for _, s := range steps {
		if err := c.Tell(s.request, s.payload, s.fds...); err != nil {
			return fmt.Errorf("queue %d: %w", q.Index, err)
		}
	}
	return q.Enable(true)
}

// address is the payload of SET_VRING_ADDR.
func (q *Queue) address() []byte {
	var flags uint32
	if q.d.log != nil {
		flags = 1 // VHOST_VRING_F_LOG
	}
	return append(U32(uint32(q.Index), flags),
		U64(user(q.Table), user(q.Used), user(q.Avail), q.Used.Addr)...)
}

// Enable enables or disables the ring. Without protocol features a ring is always enabled.
func (q *Queue) Enable(on bool) error {
	if q.d.Features&FeatureProtocolFeatures == 0 {
		return nil
	}
	var value uint32
	if on {
		value = 1
	}
	return q.d.Conn().Tell(SetVringEnable, U32(uint32(q.Index), value))
}

// Stop stops the ring (GET_VRING_BASE) and returns the index of the avail ring at which it goes on.
// All that the back end took must have ended by then, or the ring goes on with it.
func (q *Queue) Stop() (base uint16, err error) {
	reply, err := q.d.Conn().Ask(GetVringBase, U32(uint32(q.Index), 0))
	if err != nil {
		return 0, fmt.Errorf("queue %d: %w", q.Index, err)
	}
	closeAll(reply.FDs)
	if len(reply.Payload) != 8 || binary.NativeEndian.Uint32(reply.Payload) != uint32(q.Index) {
		return 0, fmt.Errorf("%w: GET_VRING_BASE of queue %d was answered with %x", ErrViolation,
			q.Index, reply.Payload)
	}
	base = uint16(binary.NativeEndian.Uint32(reply.Payload[4:]))
	return base, q.locked(func() error {
		if err := q.reapLocked(); err != nil {
			return err
		}
		// Another goroutine may be about to publish what it has added.
		if int(q.next-base) != q.waiting+q.byHand {
			return fmt.Errorf("%w: queue %d stopped at %d of %d, but %d requests have no answer",
				ErrViolation, q.Index, base, q.next, q.waiting+q.byHand)
		}
		return nil
	})
}

// SetDescriptor writes an entry of the ring's table.
func (q *Queue) SetDescriptor(i uint16, x Descriptor) {
	x.Put(q.Table.Bytes[descriptorLen*int(i):])
}

// Put writes a descriptor to the first 16 bytes of memory, for a table of a chain's own.
func (x Descriptor) Put(b []byte) {
	binary.LittleEndian.PutUint64(b, x.Addr)
	binary.LittleEndian.PutUint32(b[8:], x.Len)
	binary.LittleEndian.PutUint16(b[12:], x.Flags)
	binary.LittleEndian.PutUint16(b[14:], x.Next)
}

// Push puts a head, however wrong, into the avail ring. Publish shows it to the device.
func (q *Queue) Push(head uint16) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pushLocked(head)
	q.byHand++
}

func (q *Queue) pushLocked(head uint16) {
	binary.LittleEndian.PutUint16(q.Avail.Bytes[4+2*int(q.next%q.Size):], head)
	q.next++
}

// SetAvailIndex shows the device an index of the avail ring, however wrong.
func (q *Queue) SetAvailIndex(index uint16) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.next, q.published = index, index
	show(q.availHead, uint32(index)<<16)
}

// AvailIndex is the index of the next head.
func (q *Queue) AvailIndex() uint16 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.next
}

// Publish shows the device what was added, and kicks it if it wants that.
func (q *Queue) Publish() error {
	kick := false
	err := q.locked(func() error {
		q.startReaperLocked()
		kick = q.publishLocked()
		return nil
	})
	if kick {
		return q.Kick()
	}
	return err
}

// show writes what the device reads, before anything is read of what it writes. That takes a full
// barrier. With the race detector a store is none: Go makes a plain move of it where memory is not
// its own.
func show(word *uint32, value uint32) { atomic.SwapUint32(word, value) }

// publishLocked reports whether the device wants a kick (virtio 1.2, section 2.7.10).
func (q *Queue) publishLocked() (kick bool) {
	old := q.published
	q.published = q.next
	// The device either sees the index, or asked for a kick before.
	show(q.availHead, uint32(q.next)<<16)
	if q.d.Features&FeatureEventIndex != 0 {
		event := uint16(atomic.LoadUint32(q.availEvent))
		return q.next-event-1 < q.next-old
	}
	return atomic.LoadUint32(q.usedHead)&1 == 0
}

// state tells which side waits for the other: the indexes of both rings, at which ones who wants to
// be woken, and how many kicks nobody has read.
func (q *Queue) state() string {
	unread := "?"
	info, _ := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", q.kickFD))
	if _, rest, ok := strings.Cut(string(info), "eventfd-count:"); ok {
		unread = strings.TrimSpace(strings.SplitN(rest, "\n", 2)[0])
	}
	return fmt.Sprintf("available %d, to be kicked at %d, kicks unread %s; used %d, seen %d, "+
		"to be called at %d", q.published, uint16(atomic.LoadUint32(q.availEvent)), unread,
		q.UsedIndex(), q.lastUsed, uint16(atomic.LoadUint32(q.usedEvent)))
}

// Kick kicks the device, whether it wants that or not.
func (q *Queue) Kick() error { return signal(q.kickFD) }

// one is what is written to an eventfd.
var one = [8]byte{1}

func signal(fd int) error {
	if _, err := unix.Write(fd, one[:]); err != nil {
		return fmt.Errorf("an eventfd: %w", err)
	}
	return nil
}

// UsedIndex is the index of the used ring in memory.
func (q *Queue) UsedIndex() uint16 { return uint16(atomic.LoadUint32(q.usedHead) >> 16) }

// wait waits until something is so. It is asked under q.mu.
func (q *Queue) wait(so func() bool) error {
	timer := time.NewTimer(q.d.o.Timeout)
	defer timer.Stop()
	for {
		var changed chan struct{}
		ok := false
		err := q.locked(func() error {
			ok, changed = so(), q.changed
			q.startReaperLocked()
			return q.err
		})
		switch {
		case ok:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-changed:
		case <-timer.C:
			return fmt.Errorf("%w: queue %d, %d heads returned", ErrTimeout, q.Index,
				q.returned.Load())
		}
	}
}

// Add makes a chain of descriptors and puts it into the ring. Publish shows it to the device. If
// the ring is full, Add waits. With indirect, the chain lies in a table of its own.
func (q *Queue) Add(parts []Part, indirect bool) (*Pending, error) {
	p := &Pending{q: q, done: make(chan struct{})}
	for _, x := range parts {
		if x.Write {
			p.room += uint64(x.Len)
		}
	}
	need := len(parts)
	if indirect {
		table, err := q.d.Memory.alloc(nil, descriptorLen*len(parts), 16)
		if err != nil {
			return nil, err
		}
		p.buffers = append(p.buffers, table)
		need = 1
	}
	if need == 0 || need > int(q.Size) {
		return nil, fmt.Errorf("a chain of %d descriptors in a ring of %d", need, q.Size)
	}
	err := q.wait(func() bool {
		if len(q.free) < need || q.err != nil {
			return false
		}
		q.addLocked(p, parts, need)
		return true
	})
	if err != nil {
		q.d.Memory.Free(p.buffers...)
		return nil, err
	}
	return p, nil
}

func (q *Queue) addLocked(p *Pending, parts []Part, need int) {
	p.heads = append(p.heads, q.free[len(q.free)-need:]...)
	q.free = q.free[:len(q.free)-need]
	table, next := q.Table.Bytes, func(i int) uint16 { return p.heads[i] }
	if len(p.buffers) > 0 {
		q.SetDescriptor(p.heads[0], Descriptor{Addr: p.buffers[0].Addr,
			Len: uint32(len(p.buffers[0].Bytes)), Flags: DescIndirect})
		table, next = p.buffers[0].Bytes, func(i int) uint16 { return uint16(i) }
	}
	for i, x := range parts {
		y := Descriptor{Addr: x.Addr, Len: x.Len}
		if x.Write {
			y.Flags |= DescWrite
		}
		if i+1 < len(parts) {
			y.Flags, y.Next = y.Flags|DescNext, next(i+1)
		}
		y.Put(table[descriptorLen*int(next(i)):])
	}
	q.pushLocked(p.heads[0])
	q.pending[p.heads[0]] = p
	q.waiting++
}

// Submit is Add and Publish.
func (q *Queue) Submit(parts []Part, indirect bool) (*Pending, error) {
	p, err := q.Add(parts, indirect)
	if err != nil {
		return nil, err
	}
	return p, q.Publish()
}
