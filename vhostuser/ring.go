package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"kubevirt.io/disk/internal/bitset"
)

// Descriptors of a split virtqueue, virtio 1.2, section 2.7.5.
const (
	descSize     = 16
	descNext     = 1 << 0
	descWrite    = 1 << 1 // the device writes the memory
	descIndirect = 1 << 2
)

const (
	// maxRing is the longest ring that virtio allows.
	maxRing = 32768
	// maxChain is the most descriptors of a request. QEMU has the same limit.
	maxChain = 1024
	// availNoInterrupt and usedNoNotify ask the other side not to notify.
	availNoInterrupt = 1
	usedNoNotify     = 1
)

// ring is a split virtqueue from the device's side. The driver may write any part of it at any
// time, so each value is read once. Its methods are not for concurrent use. They read and write the
// guest's memory, which can fault.
type ring struct {
	num uint32 // descriptors, a power of two

	// As the front end has set them: addresses in its own memory, and for the dirty log in the
	// guest's.
	descUser, availUser, usedUser uint64
	usedGuest                     uint64
	logged                        bool // pages of the used ring are in the dirty log

	desc, avail, used []byte // nil: not mapped
	availGuest        uint64 // the guest address of avail

	next       uint16 // index of the next available entry
	usedNext   uint16 // index of the next used entry
	lastNotify uint16 // usedNext at the last call of mustNotify
	eventIdx   bool

	flags uint16     // the device's flags, as the driver sees them
	taken bitset.Set // the heads of requests that the device has
	fence atomic.Uint32
}

// locate finds the ring in a memory table. After an error it stays where it was.
func (r *ring) locate(t *table) (err error) {
	n := uint64(r.num)
	if n == 0 || n > maxRing || n&(n-1) != 0 {
		return fmt.Errorf("a ring has %d descriptors: that is no power of two up to %d", n, maxRing)
	}
	if r.descUser%16 != 0 || r.availUser%2 != 0 || r.usedUser%4 != 0 {
		return errors.New("a ring is not aligned")
	}
	if t == nil {
		return errors.New("a ring begins before the guest has memory")
	}
	// Both rings have one more index at their end, for EVENT_IDX.
	desc, _, err := t.atUser(r.descUser, descSize*n)
	if err != nil {
		return err
	}
	avail, guest, err := t.atUser(r.availUser, 2*n+6)
	if err != nil {
		return err
	}
	used, _, err := t.atUser(r.usedUser, 8*n+6)
	if err != nil {
		return err
	}
	if uintptr(unsafe.Pointer(&used[0]))%4 != 0 || uintptr(unsafe.Pointer(&avail[0]))%2 != 0 {
		return errors.New("a ring is not aligned")
	}
	r.desc, r.avail, r.used, r.availGuest = desc, avail, used, guest
	if len(r.taken) != int(n+63)/64 {
		r.taken = bitset.New(int64(n))
	}
	return nil
}

// load16 reads two bytes at once, in order with all other such accesses. The word around them is in
// the same page.
func load16(b []byte, off uint64) uint16 {
	at := uintptr(unsafe.Pointer(&b[off : off+2][0]))
	shift := (at & 2) * 8
	word := unsafe.Add(unsafe.Pointer(&b[off]), -int(at&2))
	return uint16(atomic.LoadUint32((*uint32)(word)) >> shift)
}

func (r *ring) availIndex() uint16 { return load16(r.avail, 2) }

// setUsed shows the driver the index of the used ring and the device's flags, in order with all
// other such accesses. An atomic store would not do with the race detector: Go makes a plain move
// of it for memory that is not Go's.
func (r *ring) setUsed() {
	atomic.SwapUint32((*uint32)(unsafe.Pointer(&r.used[0])),
		uint32(r.flags)|uint32(r.usedNext)<<16)
}

// errJump and the following ones say how a driver has broken its ring.
var (
	errJump    = errors.New("the driver's index has jumped beyond the ring")
	errHead    = errors.New("the driver gives a descriptor that the ring does not have")
	errTwice   = errors.New("the driver gives a descriptor twice")
	errLoop    = errors.New("a chain of descriptors has no end")
	errOrder   = errors.New("memory to read comes behind memory to write")
	errTable   = errors.New("a table of indirect descriptors is not one")
	errOutside = errors.New("a descriptor lies outside of the guest's memory")
	errLength  = errors.New("a request has more than 4 GiB of memory")
)

// waiting reports whether the driver has added a request that was not taken.
func (r *ring) waiting() bool { return r.availIndex() != r.next }

// take takes the head of the next request. It returns false if there is none.
func (r *ring) take() (head uint16, ok bool, err error) {
	ready := r.availIndex() - r.next
	switch {
	case ready == 0:
		return 0, false, nil
	case uint32(ready) > r.num:
		return 0, false, errJump
	}
	head = load16(r.avail, 4+2*(uint64(r.next)&uint64(r.num-1)))
	if err := r.markTaken(head); err != nil {
		return 0, false, err
	}
	r.next++
	return head, true, nil
}

// markTaken notes that the device has a request.
func (r *ring) markTaken(head uint16) error {
	switch {
	case uint32(head) >= r.num:
		return errHead
	case r.taken.Has(int64(head)):
		return errTwice
	}
	r.taken.Add(int64(head))
	return nil
}

// rewind gives back heads, all that were taken and not put back, so that the ring goes on with
// them, also on another machine. Requests between them have ended. So the heads become the last
// entries before the next one. The driver never looks at these entries again.
func (r *ring) rewind(heads []uint16, log *dirtyLog) {
	if uint16(len(heads)) != r.next-r.usedNext {
		return
	}
	r.next = r.usedNext
	for i, head := range heads {
		off := 4 + 2*(uint64(r.next+uint16(i))&uint64(r.num-1))
		binary.LittleEndian.PutUint16(r.avail[off:], head)
		log.mark(r.availGuest+off, 2)
	}
}

// descriptor is a copy of a descriptor, because the driver may change it at any time.
type descriptor struct {
	addr  uint64
	len   uint32
	flags uint16
	next  uint16
}

func readDescriptor(b []byte, i uint64) descriptor {
	var copied [descSize]byte
	copy(copied[:], b[i*descSize:])
	return descriptor{addr: binary.LittleEndian.Uint64(copied[:]),
		len: binary.LittleEndian.Uint32(copied[8:]), flags: binary.LittleEndian.Uint16(copied[12:]),
		next: binary.LittleEndian.Uint16(copied[14:])}
}

// read fills c with the request that begins at a head.
func (r *ring) read(head uint16, t *table, c *chain) error {
	c.reset(head)
	total := uint64(0)
	descs, num, indirect := r.desc, r.num, false
	for i, seen := uint32(head), uint32(0); ; seen++ {
		if seen >= num || seen >= maxChain {
			return errLoop
		}
		d := readDescriptor(descs, uint64(i))
		if d.flags&descIndirect != 0 {
			if indirect || d.flags&descNext != 0 || d.len == 0 || d.len%descSize != 0 ||
				d.len > maxRing*descSize {
				return errTable
			}
			// A table in several pieces is legal, but no driver makes one.
			if descs = t.at(d.addr, uint64(d.len)); uint64(len(descs)) != uint64(d.len) {
				return errOutside
			}
			num, indirect, i = d.len/descSize, true, 0
			seen = ^uint32(0) // counted again from 0
			continue
		}
		if total += uint64(d.len); total > 1<<32 {
			return errLength
		}
		if err := c.add(t, d); err != nil {
			return err
		}
		if d.flags&descNext == 0 {
			return nil
		}
		if i = uint32(d.next); i >= num {
			return errHead
		}
	}
}

// put gives a request back. written is how many bytes of its memory were written.
func (r *ring) put(head uint16, written uint32, log *dirtyLog) {
	off := 4 + 8*(uint64(r.usedNext)&uint64(r.num-1))
	binary.LittleEndian.PutUint32(r.used[off:], uint32(head))
	binary.LittleEndian.PutUint32(r.used[off+4:], written)
	r.usedNext++
	r.taken.Remove(int64(head))
	r.setUsed()
	if r.logged { // after the write: the front end first clears a bit, and then copies the page
		log.mark(r.usedGuest+off, 8)
		log.mark(r.usedGuest, 4)
	}
}

// mustNotify reports whether the driver wants to be notified of requests that were put back since
// it last was, virtio 1.2, section 2.7.7.2.
func (r *ring) mustNotify() bool {
	before := r.lastNotify
	r.lastNotify = r.usedNext // the driver looks again after it has asked to be notified
	if !r.eventIdx {
		return load16(r.avail, 0)&availNoInterrupt == 0
	}
	event := load16(r.avail, 4+2*uint64(r.num))
	return r.usedNext-event-1 < r.usedNext-before
}

// disableKicks asks the driver not to kick, because the device looks at the ring by itself.
func (r *ring) disableKicks() {
	if !r.eventIdx && r.flags == 0 { // with EVENT_IDX it kicks only where enableKicks asks
		r.flags = usedNoNotify
		r.setUsed()
	}
}

// enableKicks asks the driver for a kick when it adds a request. It returns false if there is one
// already: then the driver may not kick.
func (r *ring) enableKicks() bool {
	if r.eventIdx {
		binary.LittleEndian.PutUint16(r.used[4+8*uint64(r.num):], r.next)
		r.fence.Swap(0) // the index is read after this
	} else {
		r.flags = 0
		r.setUsed()
	}
	return !r.waiting()
}
