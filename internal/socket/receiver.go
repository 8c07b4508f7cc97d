package socket

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"kubevirt.io/disk/internal/memory"
)

const (
	// SmallBuffer and fullBuffer are the sizes of a receive buffer in bytes, before and after the
	// peer has introduced itself. So an unknown peer costs little memory, and with the full buffer
	// one system call receives many requests.
	SmallBuffer = 4 << 10
	fullBuffer  = 64 << 10
	// lookAhead is how many bytes after large data are received along with it: the next header, and
	// only a little of the data behind it, because that is copied once more.
	lookAhead = 4 << 10
)

// Receiver reads messages from a Wire. Only the reading goroutine uses it.
type Receiver struct {
	Wire Wire
	// BeforeWait is called before the receiver waits for the network: it sends answers. BeforeMore
	// is called before it reads more of what has arrived: that may never end, so a long queue must
	// be sent then, too. There is no call before each system call: each write wakes the peer.
	BeforeWait, BeforeMore func() error
	Clock                  func() int64
	// Works, if it is not nil, is called when the reader begins or ends to wait for the network.
	Works func(works bool)
	// Eager tries to read the rest of a message once before it waits.
	Eager bool

	// Since is when the current message began to arrive, by the Clock; 0 between messages. Heard is
	// when bytes last arrived.
	Since, Heard atomic.Int64

	buf  []byte
	r, w int            // buf[r:w] is received and not consumed
	full *memory.Buffer // backs buf; nil: it is a small one
	more bool           // the last read was full, so there probably is more
}

// Open begins with a small buffer.
func (rx *Receiver) Open(w Wire) { rx.Wire, rx.buf = w, make([]byte, SmallBuffer) }

// Grow changes to a full buffer if there is memory, and keeps the received bytes.
func (rx *Receiver) Grow(pool *memory.Pool) {
	if rx.full = pool.Receive(fullBuffer); rx.full != nil {
		rx.w = copy(rx.full.B, rx.buf[rx.r:rx.w])
		rx.r = 0
		rx.buf = rx.full.B
	}
}

// Push puts bytes in front that were read too early, at most SmallBuffer.
func (rx *Receiver) Push(early []byte) { rx.r, rx.w = 0, copy(rx.buf, early) }

// Release gives the buffer back. Nothing is received any more.
func (rx *Receiver) Release() {
	rx.full.Release()
	rx.full, rx.buf, rx.r, rx.w = nil, nil, 0, 0
}

// Buffered is how many bytes are received and not consumed.
func (rx *Receiver) Buffered() int { return rx.w - rx.r }

// read fills p and then next from the network. It returns the number of bytes, at least one.
func (rx *Receiver) read(p, next []byte) (n int, err error) {
	if rx.more || rx.Eager && rx.Since.Load() != 0 {
		if err := rx.BeforeMore(); err != nil {
			return 0, err
		}
		n, err = rx.Wire.Readv(p, next, false)
	}
	if n == 0 && err == nil {
		if err := rx.BeforeWait(); err != nil {
			return 0, err
		}
		if rx.Works != nil {
			rx.Works(false)
		}
		n, err = rx.Wire.Readv(p, next, true)
		if rx.Works != nil {
			rx.Works(true)
		}
	}
	rx.noteRead(n, len(p)+len(next))
	return n, err
}

// noteRead notes that n of at most room bytes have come.
func (rx *Receiver) noteRead(n, room int) {
	rx.more = n == room
	if n > 0 {
		rx.Heard.Store(rx.Clock())
	}
}

// Begin notes that a message has begun to arrive.
func (rx *Receiver) Begin() {
	if rx.Since.Load() == 0 {
		rx.Since.Store(rx.Clock())
	}
}

// End is called with the last byte of a message, not with the first byte of the next one, which may
// come much later: the request is executed and answered first.
func (rx *Receiver) End() {
	if rx.Since.Load() != 0 {
		rx.Since.Store(0)
	}
}

// Next returns the next n bytes, at most SmallBuffer. They are valid until the next call.
func (rx *Receiver) Next(n int) ([]byte, error) {
	if rx.r == rx.w {
		rx.r, rx.w = 0, 0
	}
	if len(rx.buf)-rx.r < n {
		rx.w = copy(rx.buf, rx.buf[rx.r:rx.w])
		rx.r = 0
	}
	for rx.w-rx.r < n {
		if rx.w > rx.r {
			rx.Begin()
		}
		m, err := rx.read(rx.buf[rx.w:], nil)
		if err != nil {
			if rx.w > rx.r {
				err = Cut(err)
			}
			return nil, err
		}
		rx.w += m
	}
	rx.r += n
	return rx.buf[rx.r-n : rx.r], nil
}

// Ready reports whether a byte has come. It does not wait.
func (rx *Receiver) Ready() (bool, error) {
	if rx.r < rx.w {
		return true, nil
	}
	n, err := rx.Wire.Readv(rx.buf, nil, false)
	rx.r, rx.w = 0, n
	rx.noteRead(n, len(rx.buf))
	return n > 0, err
}

// Await returns when at least one byte was received.
func (rx *Receiver) Await() error {
	_, err := rx.Next(1)
	if err == nil {
		rx.r--
	}
	return err
}

// Fetch fills p with at least one byte. Large data goes from the network directly to its place,
// together with the beginning of the next message, so that it is copied only once.
func (rx *Receiver) Fetch(p []byte) (int, error) {
	if rx.r < rx.w {
		n := copy(p, rx.buf[rx.r:rx.w])
		rx.r += n
		return n, nil
	}
	rx.r, rx.w = 0, 0
	if len(p) < len(rx.buf)/2 {
		m, err := rx.read(rx.buf, nil)
		if err != nil {
			return 0, Cut(err)
		}
		rx.w = m
		rx.r = copy(p, rx.buf[:m])
		return rx.r, nil
	}
	m, err := rx.read(p, rx.buf[:min(lookAhead, len(rx.buf))])
	if err != nil {
		return 0, Cut(err)
	}
	rx.w = max(m-len(p), 0)
	return min(m, len(p)), nil
}

// Fill fills p.
func (rx *Receiver) Fill(p []byte) error {
	for len(p) > 0 {
		n, err := rx.Fetch(p)
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// Discard drops n bytes.
func (rx *Receiver) Discard(n uint64) error {
	for n > 0 {
		if rx.r == rx.w {
			rx.r, rx.w = 0, 0
			m, err := rx.read(rx.buf, nil)
			if err != nil {
				return Cut(err)
			}
			rx.w = m
		}
		m := min(n, uint64(rx.w-rx.r))
		rx.r += int(m)
		n -= m
	}
	return nil
}

// Cut turns the end of a connection within a message into the error for that.
func Cut(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the peer has closed the connection within a request: %w",
			io.ErrUnexpectedEOF)
	}
	return err
}
