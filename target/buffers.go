package target

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

const (
	minBufferShift = 9  // 512 bytes: sense data, parameter lists
	maxBufferShift = 20 // 1 MiB: the longest parameter list or gathered write
	maxBuffer      = 1 << maxBufferShift

	// chunkSize is how much of a command's data is held in memory at a time, bytes. It is also the most
	// that one R2T asks for.
	chunkSize = 256 << 10

	// heldChunk is the same for a read that waits for content that lies far away, while memory is
	// scarce. Those reads may wait for long, and others must not find the memory in use by them.
	heldChunk = 16 << 10
)

// buffer is a pooled piece of memory. Whoever holds it releases it once.
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

// buffers hands out memory in powers of two, up to a limit for all sessions of a server together. Memory
// is taken when data arrives or is about to be sent, never because a peer claims a length.
type buffers struct {
	limit    int64
	used     atomic.Int64
	received atomic.Int64 // of used: receive buffers
	windows  int          // commands that sessions may have open; guarded by Server.mu
	pools    [maxBufferShift - minBufferShift + 1]sync.Pool
}

// get returns a buffer of n bytes, or nil if n is over maxBuffer or the limit is reached: the command then
// ends with BUSY, and the initiator tries again.
func (p *buffers) get(n int) *buffer {
	if n > maxBuffer {
		return nil
	}
	size := int64(1) << (minBufferShift + bufferClass(n))
	if p.used.Load()+size > p.limit { // approximate when several ask at once, by a buffer each
		return nil
	}
	return p.must(n)
}

// receive returns the receive buffer of a session, or nil where a quarter of the limit is spent on them: the session
// then goes on with the small buffer that it logged in with.
func (p *buffers) receive() *buffer {
	if p.received.Add(fullBuffer) > p.limit/4 {
		p.received.Add(-fullBuffer)
		return nil
	}
	return p.must(fullBuffer)
}

// releaseReceive ends the use of a buffer that receive returned.
func (p *buffers) releaseReceive(b *buffer) {
	if b != nil {
		p.received.Add(-fullBuffer)
		b.release()
	}
}

const (
	// commandCost is what an open command counts for besides its data, bytes: its task, which is kept
	// for the next one, its place in the session's table, and what is held of it before its turn.
	commandCost = 1 << 10
	// narrowWindow is the command window that every session has, however many there are.
	narrowWindow = 8
)

// window is the width of a new session's command window. A quarter of the limit is for open commands:
// each session gets at most an eighth of what is left of it, so that a few have all that they may, and
// windows become narrower when there are many. A window that was told cannot be taken back.
func (p *buffers) window(most int) int {
	left := int(p.limit/4/commandCost) - p.windows
	return min(max(left/8, narrowWindow), most)
}

// charge counts memory that is not a buffer, such as the stack of a goroutine that hangs in a disk. Bytes.
func (p *buffers) charge(n int64) { p.used.Add(n) }

// scarce says that half of the limit is in use: what is kept only to be fast is given back then.
func (p *buffers) scarce() bool { return p.used.Load() > p.limit/2 }

// exhausted says that the limit is reached.
func (p *buffers) exhausted() bool { return p.used.Load() >= p.limit }

// must is get without the limit, for what has to be sent so that the session can go on: a command that
// already has a place in the window and sends its next chunk, a response's sense data. n is at most maxBuffer.
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
