package target

import (
	"errors"
	"sync/atomic"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/target/internal/pdu"
)

const digestLen = 4

var (
	// errDataDigest says that a PDU's data was damaged. The framing is intact (RFC 7143 7.8).
	errDataDigest = errors.New("data digest does not match")
	// errHeaderDigest says that a header was damaged. Nothing after it can be trusted, so the
	// connection ends (RFC 7143 7.7).
	errHeaderDigest = errors.New("header digest does not match")
)

// receiver reads PDUs from a connection: see socket.Receiver.
type receiver struct {
	socket.Receiver

	headerDigest, dataDigest bool

	hdr  pdu.Header
	data segment // the data segment of the PDU in hdr

	// working counts the readers of all sessions that do not wait for the network; nil before the
	// end of login. works says whether this reader is counted.
	working *atomic.Int64
	works   bool
}

// init begins with a small buffer.
func (rx *receiver) init(w socket.Wire, clock *atomic.Int64) {
	rx.Clock, rx.Works, rx.Eager = clock.Load, rx.setWorks, true
	rx.Open(w)
}

// grow changes to a full buffer. From now on working counts this reader.
func (rx *receiver) grow(pool *memory.Pool, working *atomic.Int64) {
	rx.working = working
	rx.Grow(pool)
}

// release gives the buffer back. Nothing can be received any more.
func (rx *receiver) release() {
	rx.setWorks(false)
	rx.Release()
}

// setWorks changes whether this reader is counted as working.
func (rx *receiver) setWorks(works bool) {
	if rx.works == works || rx.working == nil {
		return
	}
	rx.works = works
	if works {
		rx.working.Add(1)
	} else {
		rx.working.Add(-1)
	}
}

// next reads the next header with its additional header segments, and checks the header digest. The
// segments are valid until more is read. The data segment must be consumed through data before next
// is called again.
func (rx *receiver) next() (ahs []byte, err error) {
	head, err := rx.Next(pdu.HeaderLen)
	if err != nil {
		return nil, err
	}
	copy(rx.hdr[:], head)
	n := rx.hdr.AHSLen()
	extra := n
	if rx.headerDigest {
		extra += digestLen
	}
	if extra > 0 {
		rx.Begin()
		rest, err := rx.Next(extra)
		if err != nil {
			return nil, socket.Cut(err)
		}
		ahs = rest[:n]
		if rx.headerDigest {
			var want [digestLen]byte
			pdu.PutDigest(want[:], pdu.Digest(rx.hdr[:], ahs))
			if [digestLen]byte(rest[n:]) != want {
				return nil, errHeaderDigest
			}
		}
	}
	rx.data = segment{rx: rx, n: rx.hdr.DataLen(), left: rx.hdr.DataLen(),
		pad: rx.hdr.PaddedDataLen() - rx.hdr.DataLen()}
	if rx.data.n > 0 {
		rx.Begin()
	} else {
		rx.data.done = true
		rx.End()
	}
	return ahs, nil
}

// segment is the data segment of one PDU. It is read to its destination or dropped. If the PDU
// arrived ahead of its turn, the data is held in memory.
type segment struct {
	rx   *receiver
	held *memory.Buffer // not nil: the data is here, already checked
	n    int            // bytes, without padding
	left int            // bytes not yet consumed
	pad  int
	crc  uint32
	done bool
}

// readInto fills p, at most what is left, from the segment. When the last byte has been read, the
// digest is checked.
func (s *segment) readInto(p []byte) error {
	if s.held != nil {
		copy(p, s.held.B[s.n-s.left:])
		s.left -= len(p)
		return nil
	}
	rx := s.rx
	for len(p) > 0 {
		n, err := rx.Fetch(p)
		if err != nil {
			return err
		}
		if rx.dataDigest {
			s.crc = pdu.UpdateDigest(s.crc, p[:n])
		}
		p = p[n:]
		s.left -= n
	}
	if s.left > 0 {
		return nil
	}
	return s.finish()
}

// finish consumes padding and digest.
func (s *segment) finish() error {
	if s.done {
		return nil
	}
	s.done = true
	rx := s.rx
	n := s.pad
	if rx.dataDigest {
		n += digestLen
	}
	if n == 0 {
		rx.End()
		return nil
	}
	tail, err := rx.Next(n)
	if err != nil {
		return socket.Cut(err)
	}
	rx.End()
	if !rx.dataDigest {
		return nil
	}
	var got [digestLen]byte
	pdu.PutDigest(got[:], pdu.UpdateDigest(s.crc, tail[:s.pad]))
	if [digestLen]byte(tail[s.pad:]) != got {
		return errDataDigest
	}
	return nil
}

// discard drops the rest, up to the next PDU. It still checks the digest.
func (s *segment) discard() error {
	if s.held != nil {
		s.held.Release()
		s.held, s.left = nil, 0
		return nil
	}
	if s.left == 0 {
		return s.finish()
	}
	var scratch [512]byte
	for s.left > 0 {
		if err := s.readInto(scratch[:min(s.left, len(scratch))]); err != nil {
			return err
		}
	}
	return nil
}

// take reads the whole segment into a new buffer, or returns nil if it is empty.
func (s *segment) take(share *memory.Share) (*memory.Buffer, error) {
	if s.left == 0 {
		return nil, s.discard()
	}
	b := share.Get(s.left)
	if b == nil {
		if err := s.discard(); err != nil {
			return nil, err
		}
		return nil, errBusy
	}
	if err := s.readInto(b.B); err != nil {
		b.Release()
		return nil, err
	}
	return b, nil
}
