package vhosttest

import "fmt"

// Migrate moves the guest to another back end, as QEMU does it live: the guest's memory is copied
// while it works, pages that the log names are copied again, the rings are stopped, what is dirty
// then follows, and the rings go on at the other end. The old memory is not used any more, so what
// the first back end wrote and did not log is lost, and shows.
//
// While it is copied, meanwhile is called. It may begin requests; those that it does not wait for
// are in the guest's memory when it arrives. What the driver itself writes is copied then.
// Buffers from before the migration lose their memory; Memory.At finds what is at their address.
func (d *Driver) Migrate(path string, meanwhile func() error) error {
	if err := d.StartLog(); err != nil {
		return err
	}
	moves, err := d.copyMemory()
	defer func() {
		for _, m := range moves {
			m.unused.close()
		}
	}()
	if err != nil {
		return err
	}
	if err := meanwhile(); err != nil {
		return err
	}
	copyPages(moves, d.Dirty())
	for _, q := range d.queues {
		// A processor notes what it writes. Here only the driver does, to these and to requests.
		q.copyOwn(moves)
	}
	bases := make([]uint16, len(d.queues))
	for i, q := range d.queues {
		if bases[i], err = q.Stop(); err != nil {
			return err
		}
		q.stopReaper()
	}
	copyPages(moves, d.Dirty())
	if err := d.Conn().Close(); err != nil {
		return err
	}
	d.log.close()
	d.log = nil
	if d.inflight != nil {
		d.inflight.close()
		d.inflight = nil
	}
	d.switchTo(moves)
	if err := d.connect(path); err != nil {
		return fmt.Errorf("the other back end: %w", err)
	}
	return d.start(func(q *Queue) uint16 { return bases[q.Index] })
}

// move is a region and its copy elsewhere.
type move struct{ region, unused *Region }

// copyMemory makes new memory for each region, and copies what is there now.
func (d *Driver) copyMemory() (moves []move, err error) {
	for _, r := range d.Memory.Regions() {
		other, err := newRegion(r.RegionOptions)
		if err != nil {
			return moves, err
		}
		copy(other.Bytes, r.Bytes)
		moves = append(moves, move{r, other})
	}
	return moves, nil
}

func copyPages(moves []move, pages []uint64) {
	for _, page := range pages {
		for _, m := range moves {
			if m.region.has(page) {
				from := page - m.region.Addr
				copy(m.unused.Bytes[from:], m.region.Bytes[from:min(from+LogPage, m.region.Size)])
			}
		}
	}
}

// copyRange copies what the driver wrote.
func copyRange(moves []move, b Buffer) {
	for _, m := range moves {
		if m.region.has(b.Addr) {
			copy(m.unused.Bytes[b.Addr-m.region.Addr:], b.Bytes)
		}
	}
}

// copyOwn copies what the driver has written since the migration began: the ring, but not what is
// used of it, and what requests say that have no answer yet.
func (q *Queue) copyOwn(moves []move) {
	q.mu.Lock()
	defer q.mu.Unlock()
	copyRange(moves, q.Table)
	copyRange(moves, q.Avail)
	for _, p := range q.pending {
		if p != nil {
			for _, b := range p.buffers {
				copyRange(moves, b)
			}
		}
	}
}

// switchTo exchanges each region with its copy, so that everything finds it at the old address.
func (d *Driver) switchTo(moves []move) {
	d.Memory.mu.Lock()
	for _, m := range moves {
		a, b := m.region, m.unused
		a.User, b.User = b.User, a.User
		a.FD, b.FD = b.FD, a.FD
		a.Bytes, b.Bytes = b.Bytes, a.Bytes
		a.file, b.file = b.file, a.file
	}
	d.Memory.mu.Unlock()
	for _, q := range d.queues {
		q.mu.Lock()
		for _, b := range []*Buffer{&q.Table, &q.Avail, &q.Used} {
			for _, m := range moves {
				if m.region.has(b.Addr) {
					b.Bytes = m.region.Bytes[b.Addr-m.region.Addr:][:len(b.Bytes)]
				}
			}
		}
		q.bind()
		q.mu.Unlock()
	}
}
