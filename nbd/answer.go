package nbd

import (
	"encoding/binary"
	"time"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
)

// answer ends a request that returns no data. wrote is how many bytes it has written.
func (c *conn) answer(q *request, wrote uint64) {
	c.tx.Lock()
	defer c.tx.Unlock()
	r := c.tx.put(nil, nil)
	if c.extended || c.structured && q.command == cmdRead {
		r.chunk(q, c.extended, replyFlagDone, chunkNone, 0)
	} else {
		r.simple(q.cookie, 0)
	}
	if wrote > 0 {
		c.tx.AckLocked(int64(wrote))
	}
}

// answerError ends a request with an error.
func (run *run) answerError(f *failure) {
	c, q := run.c, &run.req
	if !c.structured {
		c.tx.Lock()
		defer c.tx.Unlock()
		c.tx.put(nil, nil).simple(q.cookie, f.code)
		return
	}
	off, kind := f.off, uint16(chunkErrorOffset)
	if off < int64(q.off) || uint64(off) >= q.off+q.length {
		off, kind = -1, chunkError
	}
	b := c.share.Must(6 + min(len(f.text), maxString) + 8)
	b.B = appendError(b.B[:0], f.code, f.text, off)
	c.tx.Lock()
	defer c.tx.Unlock()
	r := c.tx.put(b.B, b)
	r.chunk(q, c.extended, replyFlagDone, kind, uint64(len(b.B)))
}

// answerData queues data of a read: as a whole reply, or as a chunk of one.
func (c *conn) answerData(q *request, off uint64, data []byte, b *memory.Buffer, last bool) {
	c.tx.Lock()
	defer c.tx.Unlock()
	r := c.tx.put(data, b)
	if !c.structured {
		r.simple(q.cookie, 0)
		return
	}
	r.chunk(q, c.extended, done(last), chunkData, uint64(len(data))+8)
	r.put64(off)
}

func done(last bool) uint16 {
	if last {
		return replyFlagDone
	}
	return 0
}

// answerHole queues a chunk that says that a part of a read is zeros.
func (run *run) answerHole(off, length uint64, last bool) {
	c := run.c
	c.tx.Lock()
	defer c.tx.Unlock()
	r := c.tx.put(nil, nil)
	r.chunk(&run.req, c.extended, done(last), chunkHole, 12)
	r.put64(off)
	r.put32(uint32(length))
}

// answerStatus queues the extents of a context.
func (run *run) answerStatus(id uint32, extents []extent, last bool) error {
	c, size, kind := run.c, 8, uint16(chunkStatus)
	if c.extended {
		size, kind = 16, chunkStatusExt
	}
	b, err := run.take(size * len(extents))
	if err != nil {
		return err
	}
	p := b.B[:0]
	for _, e := range extents {
		if c.extended {
			p = binary.BigEndian.AppendUint64(p, e.length)
			p = binary.BigEndian.AppendUint64(p, uint64(e.flags))
		} else {
			p = binary.BigEndian.AppendUint32(p, uint32(e.length))
			p = binary.BigEndian.AppendUint32(p, e.flags)
		}
	}
	c.tx.Lock()
	defer c.tx.Unlock()
	r := c.tx.put(p, b)
	if c.extended {
		r.chunk(&run.req, true, done(last), kind, uint64(len(p))+8)
		r.put32(id)
		r.put32(uint32(len(extents)))
		return nil
	}
	r.chunk(&run.req, false, done(last), kind, uint64(len(p))+4)
	r.put32(id)
	return nil
}

// receiver reads requests and their payloads: see socket.Receiver.
type receiver struct{ socket.Receiver }

// init begins with the bytes that the handshake has read beyond its end.
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

// sender queues replies, or parts of them, and writes them: see socket.Sender.
type sender struct{ socket.Sender[head] }

func (s *sender) init(w socket.Wire, pool *memory.Pool) {
	s.Wire, s.Pool, s.Gather = w, pool, gather
	s.Clock = func() int64 { return time.Now().UnixNano() }
}

// put queues a part of a reply. The caller at once fills in the returned head, if the part has one.
// The caller holds Lock: all parts until Unlock follow each other on the wire.
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
