package nbd

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
)

const (
	// smallBuffer and fullBuffer are the sizes of a connection's receive buffer in bytes: the full
	// one takes many requests with one system call, if there is memory.
	smallBuffer = 4 << 10
	fullBuffer  = 64 << 10
	// lookAhead is how many bytes after a large payload are received along with it: the next
	// header, and little of the data behind it, because that is copied once more.
	lookAhead = 4 << 10
)

// receiver reads requests and their payloads. It belongs to the goroutine that reads.
type receiver struct {
	wire socket.Wire
	buf  []byte
	r, w int            // buf[r:w] is received but not consumed
	full *memory.Buffer // backs buf; nil: a small buffer
	more bool           // the last read was full, so there is probably more
	// began is when it began to wait for the rest of a payload, in nanoseconds; 0: it does not
	began atomic.Int64

	// beforeWait is called before the receiver waits for the network; beforeMore, before it reads
	// more of what has arrived.
	beforeWait, beforeMore func() error
}

// init begins with the bytes that the handshake has read too much.
func (rx *receiver) init(w socket.Wire, pool *memory.Pool, early []byte) {
	rx.wire = w
	if rx.full = pool.Receive(fullBuffer); rx.full != nil {
		rx.buf = rx.full.B
	} else {
		rx.buf = make([]byte, smallBuffer)
	}
	rx.w = copy(rx.buf, early)
}

// release gives the buffer back. Nothing is received any more.
func (rx *receiver) release() {
	rx.full.Release()
	rx.full, rx.buf, rx.r, rx.w = nil, nil, 0, 0
}

// read fills p and then next from the network. Replies go out before it waits, but not before each
// system call: each write wakes the client.
func (rx *receiver) read(p, next []byte) (n int, err error) {
	if rx.more {
		if err := rx.beforeMore(); err != nil {
			return 0, err
		}
		n, err = rx.wire.Readv(p, next, false)
	}
	if n == 0 && err == nil {
		if err := rx.beforeWait(); err != nil {
			return 0, err
		}
		n, err = rx.wire.Readv(p, next, true)
	}
	rx.more = n == len(p)+len(next)
	return n, err
}

// need makes n bytes available at buf[r:]. n is at most smallBuffer.
func (rx *receiver) need(n int) error {
	if rx.r == rx.w {
		rx.r, rx.w = 0, 0
	}
	if len(rx.buf)-rx.r < n {
		rx.w = copy(rx.buf, rx.buf[rx.r:rx.w])
		rx.r = 0
	}
	for rx.w-rx.r < n {
		m, err := rx.read(rx.buf[rx.w:], nil)
		if err != nil {
			if errors.Is(err, io.EOF) && rx.w > rx.r {
				err = cut(err)
			}
			return err
		}
		rx.w += m
	}
	return nil
}

// next reads the header of the next request. Its payload must be read or discarded before next is
// called again.
func (rx *receiver) next(extended bool) (request, error) {
	n := requestLen
	if extended {
		n = extRequestLen
	}
	if err := rx.need(n); err != nil {
		return request{}, err
	}
	r, err := decodeRequest(rx.buf[rx.r:rx.r+n], extended)
	rx.r += n
	return r, err
}

// payload fills p. Large data goes from the network to its place.
func (rx *receiver) payload(p []byte) error {
	if len(p) > rx.w-rx.r {
		rx.began.Store(time.Now().UnixNano())
		defer rx.began.Store(0)
	}
	for len(p) > 0 {
		n := copy(p, rx.buf[rx.r:rx.w])
		rx.r += n
		if p = p[n:]; len(p) == 0 {
			return nil
		}
		rx.r, rx.w = 0, 0
		if len(p) < len(rx.buf)/2 {
			m, err := rx.read(rx.buf, nil)
			if err != nil {
				return cut(err)
			}
			rx.w = m
			continue
		}
		m, err := rx.read(p, rx.buf[:min(lookAhead, len(rx.buf))])
		if err != nil {
			return cut(err)
		}
		rx.w = max(m-len(p), 0)
		p = p[min(m, len(p)):]
	}
	return nil
}

// discard drops n bytes of payload.
func (rx *receiver) discard(n uint64) error {
	for n > 0 {
		if rx.r == rx.w {
			rx.r, rx.w = 0, 0
			m, err := rx.read(rx.buf, nil)
			if err != nil {
				return cut(err)
			}
			rx.w = m
		}
		m := min(n, uint64(rx.w-rx.r))
		rx.r += int(m)
		n -= m
	}
	return nil
}

// cut says that the connection was closed within a request.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the client has closed the connection within a request: %w",
			io.ErrUnexpectedEOF)
	}
	return err
}
