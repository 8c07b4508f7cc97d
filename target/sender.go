package target

import (
	"encoding/binary"
	"sync/atomic"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/target/internal/pdu"
)

const (
	// flushAlone is the weight of PDUs that the reader leaves in the queue while it has more
	// commands. While other readers work, the limit is flushBeside: the processors are busy anyway,
	// and fewer system calls cost less.
	flushAlone  = socket.FlushAt
	flushBeside = 256 << 10

	offStatSN   = 24
	offExpCmdSN = 28
	offMaxCmdSN = 32
)

// snKind is how a PDU uses StatSN.
type snKind uint8

const (
	snAdvance snKind = iota // carries a new StatSN
	snPeek                  // carries the next StatSN, but does not use it (R2T, own NOP-In)
	snNone                  // carries none (Data-In without status)
)

// outgoing is the part of a queued PDU that is not its data.
type outgoing struct {
	hdr  [pdu.HeaderLen + digestLen]byte
	tail [3 + digestLen]byte // padding and data digest
	sn   snKind
}

// sender queues PDUs and writes them: see socket.Sender. Lock order: session.mu before its lock.
type sender struct {
	socket.Sender[outgoing]
	sess *window // numbers to stamp; set before the first PDU

	headerDigest, dataDigest bool
	statSN                   uint32 // belongs to the writer
}

func (s *sender) init(to socket.Wire, clock *atomic.Int64, w *window, pool *memory.Pool) {
	s.Wire, s.Pool, s.Clock, s.Gather, s.sess = to, pool, clock.Load, s.gather, w
}

// putLocked queues one PDU. The caller may hold session.mu.
func (s *sender) putLocked(sn snKind, data []byte, release *memory.Buffer) *outgoing {
	o := s.PutLocked(data, release)
	o.sn = sn
	return o
}

type encoder interface{ Encode(*pdu.Header) }

// send queues p. data is its data segment. release is the buffer to free after the write, or nil.
func (s *sender) send(p encoder, sn snKind, data []byte, release *memory.Buffer) {
	s.Lock()
	defer s.Unlock()
	p.Encode((*pdu.Header)(s.putLocked(sn, data, release).hdr[:pdu.HeaderLen]))
}

// respond is send for a SCSI Response. As its type is known, it allocates nothing. acks is the
// number of bytes of the write that it acknowledges. It returns the weight of the queue.
func (s *sender) respond(p *pdu.SCSIResponse, acks int64, data []byte, release *memory.Buffer) int {
	s.Lock()
	defer s.Unlock()
	p.Encode((*pdu.Header)(s.putLocked(snAdvance, data, release).hdr[:pdu.HeaderLen]))
	if acks > 0 {
		s.AckLocked(acks)
	}
	return s.WeightLocked()
}

// gather stamps and digests PDUs, and lists their parts.
func (s *sender) gather(iov [][]byte, batch []socket.Message[outgoing]) [][]byte {
	expCmdSN, maxCmdSN := s.sess.numbers()
	s.sess.sentMax.Store(maxCmdSN)
	for i := range batch {
		o, data := &batch[i].Head, batch[i].Data
		h := o.hdr[:pdu.HeaderLen]
		if o.sn != snNone {
			binary.BigEndian.PutUint32(h[offStatSN:], s.statSN)
			if o.sn == snAdvance {
				s.statSN++
			}
		}
		binary.BigEndian.PutUint32(h[offExpCmdSN:], expCmdSN)
		binary.BigEndian.PutUint32(h[offMaxCmdSN:], maxCmdSN)
		if s.headerDigest {
			pdu.PutDigest(o.hdr[pdu.HeaderLen:], pdu.Digest(h))
			h = o.hdr[:]
		}
		iov = append(iov, h)
		if len(data) == 0 {
			continue
		}
		iov = append(iov, data)
		pad := -len(data) & 3
		tail := o.tail[:pad]
		clear(tail)
		if s.dataDigest {
			tail = o.tail[:pad+digestLen]
			pdu.PutDigest(tail[pad:], pdu.Digest(data, tail[:pad]))
		}
		if len(tail) > 0 {
			iov = append(iov, tail)
		}
	}
	return iov
}

// setDigests turns digests on for all PDUs from now on. Nothing is queued when login ends.
func (s *sender) setDigests(header, data bool) { s.headerDigest, s.dataDigest = header, data }
