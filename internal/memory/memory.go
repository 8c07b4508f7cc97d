// Package memory has the memory that peers make a daemon keep: the buffers of their requests, under
// one limit for all protocols. Memory is taken when data arrives or is about to be sent, never
// because a peer announces a length.
package memory

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

const (
	minShift = 9  // 512 bytes, for sense data and parameter lists
	maxShift = 20 // 1 MiB: the longest parameter list or gathered write
)

// Max is the size of the largest buffer, in bytes.
const Max = 1 << maxShift

// Buffer is a pooled piece of memory. Its holder releases it once.
type Buffer struct {
	B       []byte
	class   int
	receive bool // see Pool.Receive
	left    bool // see Leave
	from    *Pool
}

// Release gives the buffer back. It does nothing for nil.
func (b *Buffer) Release() {
	if b == nil {
		return
	}
	size := int64(cap(b.B))
	if !b.left {
		b.from.used.Add(-size)
	}
	b.left = false
	if b.receive {
		b.receive = false
		b.from.received.Add(-size)
	}
	b.from.pools[b.class].Put(b)
}

// Leave takes the buffer out of the pool's limit: its holder has one of its own.
func (b *Buffer) Leave() {
	b.left = true
	b.from.used.Add(-int64(cap(b.B)))
}

// Size is how many bytes of memory a buffer of n bytes takes.
func Size(n int) int { return 1 << (minShift + class(n)) }

// Pool allocates memory in powers of two, up to a limit. Any number of goroutines may call the
// methods.
type Pool struct {
	limit    int64
	used     atomic.Int64
	received atomic.Int64 // of used: receive buffers
	windows  atomic.Int64 // requests that clients may have open
	pools    [maxShift - minShift + 1]sync.Pool
}

// New makes a pool with a limit in bytes.
func New(limit int64) *Pool { return &Pool{limit: limit} }

// Used is how many bytes are in use.
func (p *Pool) Used() int64 { return p.used.Load() }

// Get returns a buffer of n bytes, or nil if n is over Max or the limit is reached.
func (p *Pool) Get(n int) *Buffer {
	if n > Max {
		return nil
	}
	size := int64(Size(n))
	if p.used.Load()+size > p.limit { // parallel calls may exceed the limit by a buffer each
		return nil
	}
	return p.Must(n)
}

// Must is Get without the limit, for data that must be sent so that a peer can go on. n is at most
// Max.
func (p *Pool) Must(n int) *Buffer {
	class := class(n)
	b, ok := p.pools[class].Get().(*Buffer)
	if !ok {
		b = &Buffer{B: make([]byte, 1<<(minShift+class)), class: class, from: p}
	}
	p.used.Add(int64(cap(b.B)))
	b.B = b.B[:n]
	return b
}

// Receive returns a buffer of n bytes in which a connection receives for as long as it lasts, or
// nil if such buffers take a quarter of the limit. Then the connection goes on with a small one.
func (p *Pool) Receive(n int) *Buffer {
	size := int64(Size(n))
	if p.received.Add(size) > p.limit/4 {
		p.received.Add(-size)
		return nil
	}
	b := p.Must(n)
	b.receive = true
	return b
}

const (
	// RequestCost is how many bytes an open request counts for besides its data.
	RequestCost = 1 << 10
	// narrowWindow is the smallest window of a client, however many clients there are.
	narrowWindow = 8
)

// OpenWindow returns how many requests a new client may have open, at most the given number. A
// quarter of the limit is for open requests. Each client gets at most an eighth of the rest of that
// quarter, so a few clients have the full window, and with many clients windows become narrower. A
// window cannot shrink once the peer knows it. CloseWindow follows when the client has gone.
func (p *Pool) OpenWindow(most int) int {
	for {
		open := p.windows.Load()
		left := int(p.limit/4/RequestCost) - int(open)
		width := min(max(left/8, narrowWindow), most)
		if p.windows.CompareAndSwap(open, open+int64(width)) {
			return width
		}
	}
}

// CloseWindow ends a window of OpenWindow.
func (p *Pool) CloseWindow(width int) { p.windows.Add(-int64(width)) }

// Charge counts n bytes of memory that is not a buffer, such as the stack of a goroutine that hangs
// in a disk.
func (p *Pool) Charge(n int64) { p.used.Add(n) }

// Scarce reports whether half of the limit is in use. Then memory that is kept only for speed is
// given back.
func (p *Pool) Scarce() bool { return p.used.Load() > p.limit/2 }

// Exhausted reports whether the limit is reached.
func (p *Pool) Exhausted() bool { return p.used.Load() >= p.limit }

func class(n int) int {
	if n <= 1<<minShift {
		return 0
	}
	return bits.Len(uint(n-1)) - minShift
}
