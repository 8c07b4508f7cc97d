package vhostuser

import (
	"unsafe"
)

// segment is a part of a request's memory that is contiguous here and in the guest.
type segment struct {
	p     []byte
	guest uint64 // guest physical address
}

// chain is a request: the memory that the device reads, and the memory that it writes.
type chain struct {
	head    uint16
	out, in []segment
}

func (c *chain) reset(head uint16) { c.head, c.out, c.in = head, c.out[:0], c.in[:0] }

// room is how many segments the chain has memory for.
func (c *chain) room() int64 { return int64(cap(c.out) + cap(c.in)) }

// lengthOf is how many bytes segments have.
func lengthOf(segs []segment) (n int64) {
	for i := range segs {
		n += int64(len(segs[i].p))
	}
	return n
}

// add adds the memory of a descriptor.
func (c *chain) add(t *table, d descriptor) error {
	segs := &c.out
	if d.flags&descWrite != 0 {
		segs = &c.in
	} else if len(c.in) > 0 {
		return errOrder
	}
	for addr, left := d.addr, uint64(d.len); left > 0; {
		p := t.at(addr, left)
		if p == nil {
			return errOutside
		}
		n := uint64(len(p))
		if last := len(*segs) - 1; last >= 0 && (*segs)[last].precedes(p, addr) {
			s := &(*segs)[last]
			s.p = unsafe.Slice(&s.p[0], len(s.p)+len(p))
		} else {
			*segs = append(*segs, segment{p, addr})
		}
		addr, left = addr+n, left-n
	}
	return nil
}

// precedes reports whether memory follows the segment, here and in the guest.
func (s *segment) precedes(p []byte, guest uint64) bool {
	return s.guest+uint64(len(s.p)) == guest &&
		unsafe.Add(unsafe.Pointer(&s.p[0]), len(s.p)) == unsafe.Pointer(&p[0])
}

// scatter copies p to segments, from byte at of the first one on. It returns the end of the copy.
func scatter(p []byte, segs []segment, at int) (int, []segment) {
	for len(p) > 0 {
		n := copy(segs[0].p[at:], p)
		p, at = p[n:], at+n
		if at == len(segs[0].p) {
			segs, at = segs[1:], 0
		}
	}
	return at, segs
}

// gather fills p from segments, from byte at of the first one on. It returns the end of the copy.
func gather(p []byte, segs []segment, at int) (int, []segment) {
	for len(p) > 0 {
		n := copy(p, segs[0].p[at:])
		p, at = p[n:], at+n
		if at == len(segs[0].p) {
			segs, at = segs[1:], 0
		}
	}
	return at, segs
}

// takeFront moves the first bytes of segments to b. It returns false if there are too few.
func takeFront(segs []segment, b []byte) ([]segment, bool) {
	for len(b) > 0 {
		if len(segs) == 0 {
			return segs, false
		}
		n := copy(b, segs[0].p)
		b = b[n:]
		segs[0].p, segs[0].guest = segs[0].p[n:], segs[0].guest+uint64(n)
		if len(segs[0].p) == 0 {
			segs = segs[1:]
		}
	}
	return segs, true
}

// takeLast cuts the last byte off segments and returns it, with its guest address. last nil: there
// is none.
func takeLast(segs []segment) (rest []segment, last []byte, guest uint64) {
	if len(segs) == 0 {
		return segs, nil, 0
	}
	s := &segs[len(segs)-1]
	n := len(s.p) - 1
	last, guest = s.p[n:], s.guest+uint64(n)
	s.p = s.p[:n]
	if n == 0 {
		segs = segs[:len(segs)-1]
	}
	return segs, last, guest
}
