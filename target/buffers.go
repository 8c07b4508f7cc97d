package target

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

const (
	minBufferShift = 9  // 512 bytes, for sense data and parameter lists
	maxBufferShift = 20 // 1 MiB: the longest parameter list or gathered write
	maxBuffer      = 1 << maxBufferShift

	// chunkSize is how many bytes of a command's data are in memory at a time. It is also the most
	// that one R2T asks for.
	chunkSize = 256 << 10

	// heldChunk is the same for a read that waits for far content while memory is scarce. Such
	// reads may wait for long and must leave memory for others.
	heldChunk = 16 << 10
)

// buffer is a pooled piece of memory. Its holder releases it once.
type buffer struct {
	b     []byte
	class int
	from  *buffers
}

func (b *buffer) release() {
	if b != nil {
		b.from.used.Add(-int64(cap(b.b)))
		b.from.pools[b.class].Put(b)
	}
}

// buffers allocates memory in powers of two, up to a limit for all sessions of a server together.
// Memory is allocated when data arrives or is about to be sent, never because a peer announces a
// length.
type buffers struct {
	limit    int64
	used     atomic.Int64
	received atomic.Int64 // of used: receive buffers
	windows  int          // commands that sessions may have open; guarded by Server.mu
	pools    [maxBufferShift - minBufferShift + 1]sync.Pool
}

// get returns a buffer of n bytes, or nil if n is over maxBuffer or the limit is reached. Then the
// command ends with BUSY, and the initiator tries again.
func (p *buffers) get(n int) *buffer {
	if n > maxBuffer {
		return nil
	}
	size := int64(1) << (minBufferShift + bufferClass(n))
	if p.used.Load()+size > p.limit { // parallel calls may exceed the limit by a buffer each
		return nil
	}
	return p.must(n)
}

// receive returns the receive buffer for a session, or nil if such buffers take a quarter of the
// limit. Then the session goes on with the small buffer of its login.
func (p *buffers) receive() *buffer {
	if p.received.Add(fullBuffer) > p.limit/4 {
		p.received.Add(-fullBuffer)
		return nil
	}
	return p.must(fullBuffer)
}

// releaseReceive releases a buffer of receive.
func (p *buffers) releaseReceive(b *buffer) {
	if b != nil {
		p.received.Add(-fullBuffer)
		b.release()
	}
}

const (
	// commandCost is how many bytes an open command counts for besides its data: its task, which is
	// kept for the next one, its place in the session's table, and its PDU while it is held before
	// its turn.
	commandCost = 1 << 10
	// narrowWindow is the smallest command window of a session, however many sessions there are.
	narrowWindow = 8
)

// window returns the width of a new session's command window. A quarter of the limit is for open
// commands. Each session gets at most an eighth of the rest of that quarter, so a few sessions have
// the full window, and with many sessions windows become narrower. A window cannot shrink once the
// initiator knows it.
func (p *buffers) window(most int) int {
	left := int(p.limit/4/commandCost) - p.windows
	return min(max(left/8, narrowWindow), most)
}

// charge counts n bytes of memory that is not a buffer, such as the stack of a goroutine that hangs
// in a disk.
func (p *buffers) charge(n int64) { p.used.Add(n) }

// scarce reports whether half of the limit is in use. Then memory that is kept only for speed is
// given back.
func (p *buffers) scarce() bool { return p.used.Load() > p.limit/2 }

// exhausted reports whether the limit is reached.
func (p *buffers) exhausted() bool { return p.used.Load() >= p.limit }

// must is get without the limit, for data that must be sent so that the session can go on: the next
// chunk of a command that has a place in the window, or the sense data of a response. n is at most
// maxBuffer.
func (p *buffers) must(n int) *buffer {
	class := bufferClass(n)
	b, ok := p.pools[class].Get().(*buffer)
	if !ok {
		b = &buffer{b: make([]byte, 1<<(minBufferShift+class)), class: class, from: p}
	}
	p.used.Add(int64(cap(b.b)))
	b.b = b.b[:n]
	return b
}

func bufferClass(n int) int {
	if n <= 1<<minBufferShift {
		return 0
	}
	return bits.Len(uint(n-1)) - minBufferShift
}
