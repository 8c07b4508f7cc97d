package nbd

import (
	"bytes"
	"context"
	"sync"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/memory"
)

const (
	// maxUnflushed is the default of RemoteOptions.Keep: bytes for changes that are kept or under
	// way.
	maxUnflushed = 16 << 20
	// recordCost is the memory of a change in addition to its data, in bytes.
	recordCost = 128
)

// record is a change of the disk that the server has acknowledged, and may lose if its machine
// crashes.
type record struct {
	command, flags uint16
	off, length    uint64         // bytes
	buf            *memory.Buffer // the data; nil: none
}

// unflushed are the acknowledged changes since the last flush, in the order of their
// acknowledgement. They are repeated if the server may have lost them. When half of the limit is
// acknowledged, the server is asked to flush. A change reserves its room before it is sent, so that
// it can be kept when it is acknowledged:
//
//	reserve ──► (the server acknowledges) ──► add, or giveBack ──► drop, when a flush has succeeded
type unflushed struct {
	limit int    // bytes of memory
	flush func() // begins a flush, and does not wait for it
	pool  *memory.Pool

	mu      sync.Mutex
	records []record      // guarded by mu
	first   uint64        // guarded by mu; the number of records[0]
	used    int           // guarded by mu; bytes of memory, with reserved ones
	coming  int           // guarded by mu; bytes of used that are reserved for changes under way
	waiting int           // guarded by mu; calls of reserve that wait
	failed  bool          // guarded by mu; there will be no more room
	freed   chan struct{} // guarded by mu; closed when there is more room, or never will be any
}

func newUnflushed(limit int, flush func()) *unflushed {
	return &unflushed{limit: limit, flush: flush, pool: memory.New(int64(limit)),
		freed: make(chan struct{})}
}

// largest is the longest write that is kept, in bytes. Several must fit.
func (u *unflushed) largest() int { return min(memory.Max, u.limit/4) }

// cost is how many bytes of memory a change with n bytes of data counts for.
func cost(n int) int {
	if n == 0 {
		return recordCost
	}
	return recordCost + memory.Size(n)
}

// reserve reserves room for a change with n bytes of data. It waits for room until ctx ends or fail
// is called. A flush makes room only if something was acknowledged. If that happens while reserve
// waits, add begins a flush.
func (u *unflushed) reserve(ctx context.Context, n int) error {
	n = cost(n)
	for {
		u.mu.Lock()
		if u.failed {
			u.mu.Unlock()
			return disk.ErrFailed
		}
		fits := u.used+n <= u.limit
		half := !fits || u.used-u.coming > u.limit/2
		if fits {
			u.used += n
			u.coming += n
		} else {
			u.waiting++
		}
		freed := u.freed
		u.mu.Unlock()
		if half {
			u.flush()
		}
		if fits {
			return nil
		}
		var err error
		select {
		case <-freed:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		u.mu.Lock()
		u.waiting--
		u.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// wanted reports whether calls of reserve wait for a flush.
func (u *unflushed) wanted() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.waiting > 0 && len(u.records) > 0
}

// fail ends the calls of reserve: the disk has failed.
func (u *unflushed) fail() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.failed = true
	u.freeLocked()
}

// giveBack releases the room for a change that was not acknowledged.
func (u *unflushed) giveBack(n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.used -= cost(n)
	u.coming -= cost(n)
	u.freeLocked()
}

// add keeps a change that was acknowledged.
func (u *unflushed) add(c *call) {
	if u.keep(c) {
		u.flush()
	}
}

// keep reports whether a caller of reserve waits for room. It takes the memory of a forwarded
// write.
func (u *unflushed) keep(c *call) (wanted bool) {
	r := record{command: c.command, flags: c.flags, off: c.off, length: c.length}
	switch {
	case len(c.data) == 0:
	case c.forwarded != nil:
		r.buf, c.forwarded.buf = c.forwarded.buf, nil
		r.buf.Leave()
	default:
		r.buf = u.pool.Must(len(c.data))
		copy(r.buf.B, c.data)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.coming -= cost(len(c.data))
	u.records = append(u.records, r)
	return u.waiting > 0
}

// empty reports whether all acknowledged changes are durable.
func (u *unflushed) empty() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.records) == 0
}

// before reports whether changes before a mark may be not durable.
func (u *unflushed) before(mark uint64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.records) > 0 && u.first < mark
}

// mark returns the number of the next change. A flush that begins later covers all before it.
func (u *unflushed) mark() uint64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.first + uint64(len(u.records))
}

// drop forgets the changes before a mark, which are durable.
func (u *unflushed) drop(mark uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if mark <= u.first { // another flush has dropped them
		return
	}
	n := mark - u.first
	for _, r := range u.records[:n] {
		u.used -= cost(r.bytes())
		r.buf.Release()
	}
	kept := copy(u.records, u.records[n:])
	clear(u.records[kept:])
	u.records = u.records[:kept]
	u.first = mark
	u.freeLocked()
}

func (u *unflushed) freeLocked() {
	close(u.freed)
	u.freed = make(chan struct{})
}

// calls returns the kept changes from that number on as requests, at most n of them, and the number
// of the next change.
func (u *unflushed) calls(from uint64, n int) (all []*call, next uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	from = max(from, u.first)
	for _, r := range u.records[min(from-u.first, uint64(len(u.records))):] {
		if len(all) == n {
			break
		}
		c := newCall(r.command, r.flags, r.off, r.length, nil)
		if r.buf != nil { // the record's memory may be reused before the call ends
			c.data = bytes.Clone(r.buf.B)
		}
		all = append(all, c)
	}
	return all, from + uint64(len(all))
}

// bytes is how many bytes of data the change has.
func (r *record) bytes() int {
	if r.buf == nil {
		return 0
	}
	return len(r.buf.B)
}
