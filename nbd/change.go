package nbd

import (
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
)

// lock holds the sectors of a range for a change of the disk.
func (run *run) lock(off, end int64) error {
	c, d := run.c, run.c.disk
	begin := roundDown(off)
	run.r.Hold.Set(rangelock.Write, c.client.Name(), begin, roundUp(end)-begin)
	if err := run.r.Lock(d); err != nil {
		return err
	}
	err := run.permitted()
	if err != nil {
		d.Ranges.Unlock(&run.r.Hold)
	}
	return err
}

// permitted returns an error if the request must not go on. A request that changes the disk calls
// it once it has its range, and again before each further call. A fence of the client waits for
// that range. A client whose connection has ended may have come back, and have written there.
func (run *run) permitted() error {
	c := run.c
	if c.lost() {
		return serving.ErrAborted
	}
	return c.client.Permits(&run.r, c.disk, run.req.changes())
}

func (run *run) unlock() { run.c.disk.Ranges.Unlock(&run.r.Hold) }

// write receives and executes a write. An error ends the connection.
func (run *run) write() error {
	c, q := run.c, &run.req
	if q.length > 0 { // take memory when data comes, not because it is announced
		if err := c.rx.Await(); err != nil {
			return socket.Cut(err)
		}
	}
	if q.length <= poorPiece || q.length <= memory.Max && !c.srv.disks.Memory.Scarce() {
		run.buf = c.share.Get(int(q.length))
	}
	if run.buf == nil {
		return run.writePieces()
	}
	if err := c.rx.payload(run.buf.B); err != nil {
		run.forget()
		return err
	}
	if run.forward() {
		return nil
	}
	return run.finish(run.writeBuffer())
}

// writeBuffer executes and answers a write whose payload has come.
func (run *run) writeBuffer() error {
	c, q := run.c, &run.req
	if err := run.begin(); err != nil {
		return err
	}
	defer c.disk.End()
	run.enter()
	err := run.store(run.buf.B, int64(q.off))
	if err == nil && q.flags&cmdFlagFUA != 0 {
		err = c.disk.Disk.Flush()
	}
	run.leave()
	if err == nil {
		c.answer(q, q.length)
	}
	return err
}

// writePieces is write for a payload that does not fit into memory. No other request is read
// meanwhile.
func (run *run) writePieces() error {
	c, q := run.c, &run.req
	c.sendForwarded()
	if !c.srv.disks.Memory.Scarce() {
		run.buf = c.share.Get(int(min(q.length, chunk)))
	}
	if run.buf == nil {
		run.buf = c.share.Must(int(min(q.length, poorPiece)))
	}
	run.receiving = true
	err := run.begin()
	if err == nil {
		defer c.disk.End()
	}
	for off, left := int64(q.off), q.length; left > 0; {
		p := run.buf.B[:min(left, uint64(len(run.buf.B)))]
		if err := c.rx.payload(p); err != nil {
			run.forget()
			return err
		}
		if err == nil {
			err = run.store(p, off)
		}
		off, left = off+int64(len(p)), left-uint64(len(p))
	}
	if err == nil && q.flags&cmdFlagFUA != 0 {
		err = c.disk.Disk.Flush()
	}
	if err == nil {
		c.answer(q, q.length)
	}
	return run.finish(err)
}

// store writes p. Parts of sectors at its ends are read first.
func (run *run) store(p []byte, off int64) error {
	if len(p) == 0 {
		return nil
	}
	if err := run.lock(off, off+int64(len(p))); err != nil {
		return err
	}
	defer run.unlock()
	return run.storeLocked(p, off)
}

// storeLocked is store for a range that is held. A disk of another server gets parts of sectors
// unchanged: other clients may write the rest of the sector there.
func (run *run) storeLocked(p []byte, off int64) error {
	c := run.c
	if c.far != nil || aligned(off, off+int64(len(p))) {
		n, err := run.r.WriteAt(c.disk, p, off)
		c.bytesWritten.Add(uint64(n))
		return err
	}
	b := c.share.Must(min(len(p)+2*disk.SectorSize, chunk))
	defer b.Release()
	for len(p) > 0 {
		begin := roundDown(off)
		n := min(roundUp(off+int64(len(p)))-begin, roundDown(int64(len(b.B))))
		sectors := b.B[:n]
		if _, err := run.r.ReadAt(c.disk, sectors, begin); err != nil {
			return err
		}
		m := copy(sectors[off-begin:], p)
		if _, err := run.r.WriteAt(c.disk, sectors, begin); err != nil {
			return err
		}
		c.bytesWritten.Add(uint64(m))
		p, off = p[m:], off+int64(m)
	}
	return nil
}

func roundDown(off int64) int64 { return off / disk.SectorSize * disk.SectorSize }

func roundUp(off int64) int64 { return roundDown(off + disk.SectorSize - 1) }

// aligned reports whether a range begins and ends with sectors.
func aligned(off, end int64) bool { return (off|end)%disk.SectorSize == 0 }

// trim gives space back. It is only a hint, so it leaves parts of sectors alone.
func (run *run) trim() error {
	d := run.c.disk
	if d.Discards == nil {
		return fail(eInval, "the disk cannot give space back")
	}
	off := roundUp(int64(run.req.off))
	end := roundDown(int64(run.req.off + run.req.length))
	if off >= end {
		return nil
	}
	if err := run.lock(off, end); err != nil {
		return err
	}
	defer run.unlock()
	return run.steps(off, end, stretch, func(off, n int64) error {
		return run.r.Discard(d, off, n)
	})
}

// steps calls f for each part of a range that is held.
func (run *run) steps(off, end, most int64, f func(off, n int64) error) error {
	return run.r.Steps(run.c.disk, off, end, most, run.permitted, f)
}

var zeroes [chunk]byte

// zero makes a range read as zeros. It writes zeros to parts of sectors, and to the whole range for
// a client that wants no hole. The whole range is held meanwhile: a write of the client's next
// connection must not come in between.
func (run *run) zero() error {
	d, q := run.c.disk, &run.req
	off, end := int64(q.off), int64(q.off+q.length)
	first, last := roundUp(off), roundDown(end)
	written := q.flags&cmdFlagNoHole != 0 || d.Zeroes == nil
	switch {
	case written && q.flags&cmdFlagFastZero != 0:
		return errSlowZero
	case off == end:
		return nil
	}
	if err := run.lock(off, end); err != nil {
		return err
	}
	defer run.unlock()
	write := func(off, n int64) error { return run.storeLocked(zeroes[:n], off) }
	switch {
	case first >= last: // within two sectors
		return write(off, end-off)
	case first > off:
		if err := write(off, first-off); err != nil {
			return err
		}
	}
	step, most := write, int64(chunk)
	if !written {
		step, most = func(off, n int64) error { return run.r.Zero(d, off, n) }, stretch
	}
	if err := run.steps(first, last, most, step); err != nil || last == end {
		return err
	}
	return write(last, end-last)
}

// cache reads a range, so that later reads of it are fast.
func (run *run) cache() error {
	b := run.c.share.Must(chunk)
	defer b.Release()
	return run.steps(int64(run.req.off), int64(run.req.off+run.req.length), chunk,
		func(off, n int64) error {
			_, err := run.r.ReadAt(run.c.disk, b.B[:n], off)
			return err
		})
}
