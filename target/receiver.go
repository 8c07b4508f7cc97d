package target

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/target/internal/pdu"
)

const (
	// loginBuffer and fullBuffer are the sizes in bytes of the receive buffers before and after
	// login. An unknown peer costs little memory, and a peer that has logged in can send many
	// commands per system call.
	loginBuffer = 4 << 10
	fullBuffer  = 64 << 10

	// lookAhead is how many bytes after a large data segment are received along with it: the next
	// header, and only a little of the data behind it, because that is copied once more.
	lookAhead = 4 << 10

	digestLen = 4
)

var (
	// errDataDigest says that a PDU's data was damaged. The framing is intact (RFC 7143 7.8).
	errDataDigest = errors.New("data digest does not match")
	// errHeaderDigest says that a header was damaged. Nothing after it can be trusted, so the
	// connection ends (RFC 7143 7.7).
	errHeaderDigest = errors.New("header digest does not match")
)

// receiver reads PDUs from a connection. It belongs to the goroutine that reads.
type receiver struct {
	wire socket.Wire
	buf  []byte
	r, w int            // buf[r:w] is received but not consumed
	full *memory.Buffer // backs buf after login; nil: the small buffer is still in use
	more bool           // the last read was full, so there is probably more

	headerDigest, dataDigest bool

	hdr  pdu.Header
	ahs  [255 * 4]byte
	data segment // the data segment of the PDU in hdr

	// beforeWait runs before the receiver waits for the network: it sends queued responses.
	// beforeMore runs before the receiver reads more data that has arrived already: that may never
	// end, so a long queue must go out then, too.
	beforeWait, beforeMore func() error
	// working counts the readers of all sessions that do not wait for the network; nil before the
	// end of login. works says whether it counts this one.
	working *atomic.Int64
	works   bool
	// pduSince is when the current PDU began to arrive, on the server's coarse clock; 0 between
	// PDUs.
	pduSince atomic.Int64
	// heard is when bytes last arrived, on the same clock.
	heard atomic.Int64
	clock *atomic.Int64
}

// grow changes to a full buffer if there is memory, and keeps the received bytes. From now on
// working counts this reader.
func (rx *receiver) grow(pool *memory.Pool, working *atomic.Int64) {
	rx.working = working
	if rx.full = pool.Receive(fullBuffer); rx.full != nil {
		rx.w = copy(rx.full.B, rx.buf[rx.r:rx.w])
		rx.r = 0
		rx.buf = rx.full.B
	}
}

// release gives the buffer back. Nothing can be received any more.
func (rx *receiver) release() {
	rx.setWorks(false)
	rx.full.Release()
	rx.full, rx.buf, rx.r, rx.w = nil, nil, 0, 0
}

// read fills p and then next from the network. It returns the number of bytes, at least one. Before
// it waits, it sends the responses that are queued. Before a system call that does not wait, it
// sends none: each write wakes the peer, and with a stream of commands that would be once for each.
func (rx *receiver) read(p, next []byte) (n int, err error) {
	if rx.more || rx.pduSince.Load() != 0 {
		if err := rx.beforeMore(); err != nil {
			return 0, err
		}
		n, err = rx.wire.Readv(p, next, false)
	}
	if n == 0 && err == nil {
		if err := rx.beforeWait(); err != nil {
			return 0, err
		}
		rx.setWorks(false)
		n, err = rx.wire.Readv(p, next, true)
		rx.setWorks(true)
	}
	rx.more = n == len(p)+len(next)
	if n > 0 {
		rx.heard.Store(rx.clock.Load())
	}
	return n, err
}

// setWorks counts the reader among those that work, or no longer.
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

// need makes n bytes available at buf[r:]. n is at most the buffer's size.
func (rx *receiver) need(n int) error {
	if len(rx.buf)-rx.r < n {
		rx.w = copy(rx.buf, rx.buf[rx.r:rx.w])
		rx.r = 0
	}
	for rx.w-rx.r < n {
		if rx.w > rx.r {
			rx.startPDU()
		}
		m, err := rx.read(rx.buf[rx.w:], nil)
		if err != nil {
			if errors.Is(err, io.EOF) && rx.w > rx.r {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		rx.w += m
	}
	return nil
}

func (rx *receiver) startPDU() {
	if rx.pduSince.Load() == 0 {
		rx.pduSince.Store(rx.clock.Load())
	}
}

// endPDU is called with the last byte of a PDU, not with the first byte of the next one. It may be
// long until then, as the command is executed and answered first.
func (rx *receiver) endPDU() {
	if rx.pduSince.Load() != 0 {
		rx.pduSince.Store(0)
	}
}

// next reads the next header with its additional header segments and checks the header digest. The
// data segment must be consumed through data before next is called again.
func (rx *receiver) next() (ahs []byte, err error) {
	if rx.r == rx.w {
		rx.r, rx.w = 0, 0
	}
	if err := rx.need(pdu.HeaderLen); err != nil {
		return nil, err
	}
	copy(rx.hdr[:], rx.buf[rx.r:])
	rx.r += pdu.HeaderLen
	n := rx.hdr.AHSLen()
	extra := n
	if rx.headerDigest {
		extra += digestLen
	}
	if extra > 0 {
		rx.startPDU()
		if err := rx.need(extra); err != nil {
			return nil, noEOF(err)
		}
		ahs = rx.ahs[:copy(rx.ahs[:n], rx.buf[rx.r:])]
		if rx.headerDigest {
			var want [digestLen]byte
			pdu.PutDigest(want[:], pdu.Digest(rx.hdr[:], ahs))
			if [digestLen]byte(rx.buf[rx.r+n:rx.r+extra]) != want {
				return nil, errHeaderDigest
			}
		}
		rx.r += extra
	}
	rx.data = segment{rx: rx, n: rx.hdr.DataLen(), left: rx.hdr.DataLen(),
		pad: rx.hdr.PaddedDataLen() - rx.hdr.DataLen()}
	if rx.data.n > 0 {
		rx.startPDU()
	} else {
		rx.data.done = true
		rx.endPDU()
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
		n := copy(p, rx.buf[rx.r:rx.w])
		if n > 0 {
			rx.r += n
		} else {
			var err error
			if n, err = rx.fetch(p); err != nil {
				return noEOF(err)
			}
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

// fetch reads at least one byte into p. If p is large, it reads directly from the network, so that
// data is copied only once, together with the beginning of the next PDU. Otherwise it reads through
// the buffer.
func (rx *receiver) fetch(p []byte) (int, error) {
	rx.r, rx.w = 0, 0
	if len(p) >= len(rx.buf)/2 {
		m, err := rx.read(p, rx.buf[:min(lookAhead, len(rx.buf))])
		if m > len(p) {
			rx.w = m - len(p)
			m = len(p)
		}
		return m, err
	}
	m, err := rx.read(rx.buf, nil)
	if err != nil {
		return 0, err
	}
	rx.w = m
	n := copy(p, rx.buf[:m])
	rx.r = n
	return n, nil
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
		rx.endPDU()
		return nil
	}
	if err := rx.need(n); err != nil {
		return noEOF(err)
	}
	rx.endPDU()
	tail := rx.buf[rx.r : rx.r+n]
	rx.r += n
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

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("connection closed within a PDU: %w", io.ErrUnexpectedEOF)
	}
	return err
}
