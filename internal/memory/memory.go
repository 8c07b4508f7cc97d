// Package memory counts the memory that peers make a daemon keep: the buffers of their requests,
// under one limit for all protocols. Memory is taken when data arrives or is about to be sent,
// never because a peer announces a length.
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
	share   *Share // nil: of no client
}

// Release gives the buffer back. It does nothing for nil.
func (b *Buffer) Release() {
	if b == nil {
		return
	}
	size := int64(cap(b.B))
	if !b.left {
		b.give()
	}
	b.left = false
	if b.receive {
		b.receive = false
		b.from.received.Add(-size)
	}
	b.from.pools[b.class].Put(b)
}

// Leave removes the buffer from the pool's limit: its holder has a limit of its own.
func (b *Buffer) Leave() {
	b.left = true
	b.give()
}

// give ends the counting of the buffer.
func (b *Buffer) give() {
	size := int64(cap(b.B))
	b.from.used.Add(-size)
	if b.share != nil {
		b.share.used.Add(-size)
		b.share = nil
	}
}

// Size is how many bytes of memory a buffer of n bytes takes.
func Size(n int) int { return 1 << (minShift + class(n)) }

// Pool allocates memory in powers of two, up to a limit. Any number of goroutines may call the
// methods.
type Pool struct {
	limit    int64
	used     atomic.Int64
	received atomic.Int64 // part of used: receive buffers
	windows  atomic.Int64 // requests that clients may have open
	pools    [maxShift - minShift + 1]sync.Pool

	clients atomic.Int64 // number of shares
	mu      sync.Mutex
	shares  map[string]*Share // guarded by mu; by client
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
	if p.used.Add(size) > p.limit {
		p.used.Add(-size)
		return nil
	}
	return p.take(n)
}

// Must is Get without the limit, for data that must be sent so that a peer can go on. n is at most
// Max.
func (p *Pool) Must(n int) *Buffer {
	p.used.Add(int64(Size(n)))
	return p.take(n)
}

// take returns a buffer that is already counted.
func (p *Pool) take(n int) *Buffer {
	class := class(n)
	b, ok := p.pools[class].Get().(*Buffer)
	if !ok {
		b = &Buffer{B: make([]byte, 1<<(minShift+class)), class: class, from: p}
	}
	b.B = b.B[:n]
	return b
}

// leastShare is what every client may have when the limit is reached, in bytes, even with many
// clients: a read's buffer.
const leastShare = 256 << 10

// Share is the part of a pool for the connections of one client. A client that does not read its
// replies must not use up the memory of others. So a client gets any memory up to the limit and,
// once the limit is reached, its part of another quarter of the limit, which is divided equally
// among all clients.
type Share struct {
	*Pool
	client string
	conns  int // guarded by Pool.mu
	used   atomic.Int64
}

// Join returns the share of a client, for one of its connections. Part follows.
func (p *Pool) Join(client string) *Share {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.shares[client]
	if s == nil {
		if p.shares == nil {
			p.shares = map[string]*Share{}
		}
		s = &Share{Pool: p, client: client}
		p.shares[client] = s
		p.clients.Add(1)
	}
	s.conns++
	return s
}

// Part ends the use of the share by a connection. Buffers may be released later. It does nothing
// for nil.
func (s *Share) Part() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns--; s.conns == 0 {
		delete(s.shares, s.client)
		s.clients.Add(-1)
	}
}

// Get is Pool.Get for the client.
func (s *Share) Get(n int) *Buffer {
	if n > Max {
		return nil
	}
	size := int64(Size(n))
	own, all := s.used.Add(size), s.Pool.used.Add(size)
	part := max(s.limit/4/max(s.clients.Load(), 1), min(s.limit/4, leastShare))
	if all > s.limit && own > part {
		s.used.Add(-size)
		s.Pool.used.Add(-size)
		return nil
	}
	b := s.take(n)
	b.share = s
	return b
}

// Must is Pool.Must for the client.
func (s *Share) Must(n int) *Buffer {
	b := s.Pool.Must(n)
	s.used.Add(int64(cap(b.B)))
	b.share = s
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
	// RequestCost is how many bytes an open request counts for in addition to its data.
	RequestCost = 1 << 10
	// narrowWindow is the smallest window of a client, even with many clients.
	narrowWindow = 8
)

// OpenWindow returns how many requests a new client may have open, at most most. A quarter of the
// limit is for open requests. Each client gets at most an eighth of the free part of that quarter,
// so a few clients have the full window, and with many clients windows become narrower. A window
// cannot shrink once the peer knows it. CloseWindow follows when the client has ended.
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

// CloseWindow returns a window of OpenWindow.
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
