package nbd

import (
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
)

// receiver reads requests and their payloads: see socket.Receiver.
type receiver struct{ socket.Receiver }

// init begins with the bytes that the handshake has read too much.
func (rx *receiver) init(w socket.Wire, pool *memory.Pool, early []byte) {
	rx.Clock = func() int64 { return time.Now().UnixNano() }
	rx.Open(w)
	rx.Push(early)
	rx.Grow(pool)
}

// next reads the header of the next request. Its payload must be read or discarded before next is
// called again.
func (rx *receiver) next(extended bool) (request, error) {
	n := requestLen
	if extended {
		n = extRequestLen
	}
	head, err := rx.Next(n)
	rx.End()
	if err != nil {
		return request{}, err
	}
	return decodeRequest(head, extended)
}

// payload fills p.
func (rx *receiver) payload(p []byte) error {
	if len(p) > rx.Buffered() {
		rx.Begin()
		defer rx.End()
	}
	return rx.Fill(p)
}
