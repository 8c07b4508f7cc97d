package nbd

import (
	"context"
	"sync"

	"kubevirt.io/disk/disk"
)

const (
	// maxUnflushed is how many bytes of acknowledged writes a client keeps. When half of that is
	// used, it asks the server to make them durable.
	maxUnflushed = 8 << 20
	// maxRecords is the same for the number of writes, discards and zeroings.
	maxRecords = 16 << 10
	// maxLogged is the longest write that is kept. The server makes longer ones durable at once.
	maxLogged = 1 << 20
)

// record is a change of the disk that the server has acknowledged, and may lose if its machine
// crashes.
type record struct {
	command, flags uint16
	off, length    uint64 // bytes
	at             uint64 // where the data is in unflushed.ring, modulo its length
}

// unflushed are the acknowledged changes since the last flush, in the order of their
// acknowledgement. They are made again after a connection broke: nothing else tells whether the
// server's machine has crashed. A change takes its room before it is sent, so that it can be kept
// when it is acknowledged:
//
//	reserve ──► (the server acknowledges) ──► add, or giveBack ──► drop, when a flush has succeeded
type unflushed struct {
	flush func() // begins a flush, and does not wait for it

	mu       sync.Mutex
	ring     []byte        // guarded by mu; nil until the first write
	records  []record      // guarded by mu
	first    uint64        // guarded by mu; the number of records[0]
	head     uint64        // guarded by mu; where the next data goes in ring
	used     int           // guarded by mu; bytes of the ring, with what is reserved
	reserved int           // guarded by mu; changes under way
	waiting  int           // guarded by mu; calls of reserve that wait
	failed   bool          // guarded by mu; there will be no more room
	freed    chan struct{} // guarded by mu; closed when there is more room, or never will be
}

func newUnflushed(flush func()) *unflushed {
	return &unflushed{flush: flush, freed: make(chan struct{})}
}

// reserve takes room for a change with n bytes of data. It waits for room until ctx ends or fail is
// called. A flush helps those that wait only if something was acknowledged, and that may be later:
// add begins one then.
func (u *unflushed) reserve(ctx context.Context, n int) error {
	for {
		u.mu.Lock()
		if u.failed {
			u.mu.Unlock()
			return disk.ErrFailed
		}
		records := len(u.records) + u.reserved
		fits := u.used+n <= maxUnflushed && records < maxRecords
		half := u.used+n > maxUnflushed/2 || records > maxRecords/2
		if fits {
			u.used += n
			u.reserved++
			if u.ring == nil {
				u.ring = make([]byte, maxUnflushed)
			}
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

// giveBack gives back the room for a change that was not acknowledged.
func (u *unflushed) giveBack(n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.reserved--
	u.used -= n
	u.freeLocked()
}

// add keeps a change that was acknowledged.
func (u *unflushed) add(c *call) {
	if u.keep(c) {
		u.flush()
	}
}

// keep reports whether somebody waits for room.
func (u *unflushed) keep(c *call) (wanted bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.reserved--
	r := record{command: c.command, flags: c.flags, off: c.off, length: c.length, at: u.head}
	for p := c.data; len(p) > 0; {
		n := copy(u.ring[u.head%maxUnflushed:], p)
		p = p[n:]
		u.head += uint64(n)
	}
	u.records = append(u.records, r)
	return u.waiting > 0
}

// empty reports whether everything that was acknowledged is durable.
func (u *unflushed) empty() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.records) == 0
}

// mark returns the number of the next change. A flush that begins later covers all before it.
func (u *unflushed) mark() uint64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.first + uint64(len(u.records))
}

// drop forgets the changes before a mark: they are durable.
func (u *unflushed) drop(mark uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if mark <= u.first { // another flush has done so
		return
	}
	n := mark - u.first
	for _, r := range u.records[:n] {
		u.used -= r.bytes()
	}
	u.records = append(u.records[:0], u.records[n:]...)
	u.first = mark
	u.freeLocked()
}

func (u *unflushed) freeLocked() {
	close(u.freed)
	u.freed = make(chan struct{})
}

// calls returns the kept changes from that number on as requests, at most n of them.
func (u *unflushed) calls(from uint64, n int) (all []*call) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if from < u.first {
		from = u.first
	}
	for _, r := range u.records[min(from-u.first, uint64(len(u.records))):] {
		if len(all) == n {
			break
		}
		c := newCall(r.command, r.flags, r.off, r.length, nil)
		for at, left := r.at, r.bytes(); left > 0; {
			i := int(at % maxUnflushed)
			part := u.ring[i:min(i+left, maxUnflushed)]
			c.data = append(c.data, part...)
			at, left = at+uint64(len(part)), left-len(part)
		}
		all = append(all, c)
	}
	return all
}

// bytes is how much of the ring the change takes.
func (r *record) bytes() int {
	if r.command == cmdWrite {
		return int(r.length)
	}
	return 0
}
