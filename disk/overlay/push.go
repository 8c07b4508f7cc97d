package overlay

import (
	"context"
	"time"

	"kubevirt.io/disk/disk/internal/slots"
)

// pushChunk is how much Push moves at once. Bytes.
const pushChunk = 1 << 20

// Push moves all content of a frozen layer into the layer below. That layer is frozen, too, and
// only this layer is above it, so no reader sees a difference. The caller then flushes the layer
// below, records that it is in the place of this one, and puts it there. Push may be repeated from
// the beginning, also by the next process.
//
// With free, Push takes turns with the copying of other disks, and rests while the guest is active.
// With nil it does not, and ctx only limits the wait for an image. disk.ErrNotNow comes from a far
// image.
func (o *Disk) Push(ctx context.Context, free *slots.Slots) error {
	to := o.lower.Load()
	size := o.Size()
	if to.Size() < size {
		if err := to.Grow(size); err != nil {
			return err
		}
	}
	buf := make([]byte, min(pushChunk, size))
	for off := int64(0); off < size; {
		own, n := o.run(off, size-off)
		if begin := max(off, o.floor); !own && begin < off+n && to.owned(begin, off+n-begin) {
			// These are zeros behind the end of the layer below. A push before a power cut may have
			// left data there that this layer has lost.
			if err := to.punch(begin, off+n-begin); err != nil {
				return err
			}
		}
		for end := off + n; own && off < end; {
			begin := time.Now()
			step := func() (err error) {
				n, err = o.pushRun(ctx, to, buf, off, end-off)
				return err
			}
			var err error
			if free == nil {
				err = step()
			} else if err = free.Do(ctx, step); err == nil {
				err = slots.Rest(ctx, o.Rest(time.Since(begin)))
			}
			if err != nil {
				return err
			}
			off += n
			n = 0
		}
		off += n
	}
	// Storage may have lost data of this layer before it was read here. Only a flush of this file
	// reports that, and the file is about to be removed.
	return o.flushFile()
}

// pushRun pushes the beginning of a range that the layer has itself, and returns its length.
func (o *Disk) pushRun(ctx context.Context, to *Disk, buf []byte, off, length int64) (int64,
	error,
) {
	e, err := o.file.Extent(ctx, off, length)
	if err != nil {
		return 0, err
	}
	if !e.Data {
		if to.owned(off, e.Length) {
			return e.Length, to.punch(off, e.Length)
		}
		return e.Length, to.change(ctx, changeDiscard, nil, off, e.Length, nil)
	}
	p := buf[:min(e.Length, int64(len(buf)))]
	if _, err := o.file.ReadAt(ctx, p, off); err != nil {
		return 0, err
	}
	if to.owned(off, int64(len(p))) {
		return int64(len(p)), to.writeFile(p, off)
	}
	return int64(len(p)), to.change(ctx, changeWrite, p, off, int64(len(p)), nil)
}
