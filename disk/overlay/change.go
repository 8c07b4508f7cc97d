package overlay

import (
	"context"
	"fmt"
	"sync"

	"kubevirt.io/disk/internal/rangelock"
)

// change is a kind of operation on a range.
type change int

const (
	changeWrite change = iota
	changeDiscard
	changeZero
)

func (c change) String() string {
	switch c {
	case changeWrite:
		return "write"
	case changeDiscard:
		return "discard"
	case changeZero:
		return "zeroing"
	}
	return fmt.Sprintf("change %d", int(c))
}

func (o *Disk) apply(ctx context.Context, op change, p []byte, off, length int64) error {
	switch op {
	case changeDiscard:
		return o.file.Discard(ctx, off, length)
	case changeZero:
		return o.file.Zero(ctx, off, length)
	default:
		_, err := o.file.WriteAt(ctx, p, off)
		return err
	}
}

// change does op to a range whose blocks may not be marked yet, and marks them. gate is the disk
// for a change of the guest, and nil for a push from the layer above.
//
// If the first or the last block is only partly in the range, the rest of the block is read from
// the image. This is done before the blocks are locked, because a read may take long and others
// must not wait for it. The image does not change, and a block that is marked meanwhile does not
// need it.
func (o *Disk) change(ctx context.Context, op change, p []byte, off, length int64,
	gate *Disk) error {
	first, last := o.span(off, length)
	end := off + length
	headBegin, headEnd := o.bounds(first)
	tailBegin, tailEnd := o.bounds(last)
	var head, tail edge
	defer head.release(o)
	defer tail.release(o)
	inHead := off > headBegin && !o.blocks.allSet(first, first)
	inTail := end < tailEnd && !o.blocks.allSet(last, last)
	merge := op == changeWrite && first == last && (inHead || inTail)
	if merge {
		headEnd, inHead, inTail = tailEnd, true, false
	} else {
		headEnd, tailBegin = min(off, headEnd), max(end, tailBegin)
	}
	if inHead {
		if err := head.read(ctx, o, headBegin, headEnd); err != nil {
			return err
		}
	}
	if inTail {
		if err := tail.read(ctx, o, tailBegin, tailEnd); err != nil {
			return err
		}
	}

	held := o.locks.lock(first, last)
	defer o.locks.unlock(held)
	if gate != nil {
		if err := gate.enter(); err != nil {
			return err
		}
		defer gate.leave()
	}
	inHead = inHead && !o.blocks.allSet(first, first)
	inTail = inTail && !o.blocks.allSet(last, last)
	if inHead && head.content == nil || inTail && tail.content == nil {
		return fmt.Errorf("block at %d has no content: the image was dropped too early", headBegin)
	}
	if merge && inHead { // the block is written at once, together with its part of p
		n := copy(head.content[off-headBegin:], p)
		p, off, length = p[n:], off+int64(n), length-int64(n) // the part behind the mapped blocks
	}
	if inHead {
		if err := head.write(ctx, o); err != nil {
			return err
		}
	}
	if inTail {
		if err := tail.write(ctx, o); err != nil {
			return err
		}
	}
	if length > 0 {
		if err := o.apply(ctx, op, p, off, length); err != nil {
			return err
		}
	}
	return o.mark(first, last)
}

// bounds returns where a block begins and ends. The last block of the image may be short, although
// the disk may be larger than the image.
func (o *Disk) bounds(block int64) (begin, end int64) {
	return block * o.granule, min((block+1)*o.granule, o.Size())
}

// edge is the part of a block that comes from the image.
type edge struct {
	buf     *[]byte // of the disk's scratch; nil: unused
	content []byte  // nil: not read, or the disk no longer needs the image
	off     int64
}

// read reads the edge from the image.
func (e *edge) read(ctx context.Context, o *Disk, begin, end int64) error {
	e.buf, e.off = o.scratch.Get().(*[]byte), begin
	if o.opt.Reads != nil {
		o.opt.Reads(begin, end-begin)
	}
	n, err := o.readForGuest(ctx, (*e.buf)[:end-begin], begin)
	if n > 0 {
		e.content = (*e.buf)[:n]
	}
	return err
}

// write writes the edge to the file.
func (e *edge) write(ctx context.Context, o *Disk) error {
	_, err := o.file.WriteAt(ctx, e.content, e.off)
	return err
}

func (e *edge) release(o *Disk) {
	if e.buf != nil {
		o.scratch.Put(e.buf)
	}
}

// blockLocks lock ranges of blocks. Waiters are served first in, first out. The zero value is ready
// to use.
type blockLocks struct{ table rangelock.Table }

var holds = sync.Pool{New: func() any { return new(rangelock.Hold) }}

// lock waits for the blocks first to last, and locks them until unlock.
func (l *blockLocks) lock(first, last int64) *rangelock.Hold {
	h := holds.Get().(*rangelock.Hold)
	h.Set(rangelock.Write, "", first, last-first+1)
	l.table.Lock(h)
	return h
}

func (l *blockLocks) unlock(h *rangelock.Hold) {
	l.table.Unlock(h)
	holds.Put(h)
}
