package nbd

import (
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
)

// sender queues replies, or parts of them, and writes them: see socket.Sender.
type sender struct{ socket.Sender[head] }

func (s *sender) init(w socket.Wire, pool *memory.Pool) {
	s.Wire, s.Pool, s.Gather = w, pool, gather
	s.Clock = func() int64 { return time.Now().UnixNano() }
}

// put queues a part of a reply, whose head the caller makes at once, if it has one. The caller has
// called Lock; parts that it puts until Unlock follow each other on the wire.
func (s *sender) put(data []byte, release *memory.Buffer) *head {
	h := s.PutLocked(data, release)
	h.n = 0
	return h
}

// full reports whether the queue should be written now.
func (s *sender) full() bool { return s.Weight() >= socket.FlushAt }

// gather lists the parts of replies.
func gather(iov [][]byte, batch []socket.Message[head]) [][]byte {
	for i := range batch {
		if h := &batch[i].Head; h.n > 0 {
			iov = append(iov, h.b[:h.n])
		}
		if data := batch[i].Data; len(data) > 0 {
			iov = append(iov, data)
		}
	}
	return iov
}
