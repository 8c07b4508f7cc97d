package image

import (
	"context"

	"golang.org/x/sync/errgroup"
)

// edgesHead is how much of a far source's beginning is read at once. If an image was written in one
// go, as by qemu-img, its header and first tables are there. Bytes.
const edgesHead = 512 << 10

// edges is a source that is far away. It keeps the beginning and the end in memory while an image
// is opened, because opening reads many small pieces of them.
type edges struct {
	Source
	head, tail []byte
}

// load reads both edges at once.
func (e *edges) load(ctx context.Context) error {
	size := e.Size()
	head, tail := make([]byte, min(size, edgesHead)), make([]byte, min(size, tailSize))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return readFull(ctx, e.Source, head, 0) })
	if size > edgesHead {
		group.Go(func() error { return readFull(ctx, e.Source, tail, size-int64(len(tail))) })
	}
	err := group.Wait()
	if size <= edgesHead {
		copy(tail, head[size-int64(len(tail)):])
	}
	e.head, e.tail = head, tail
	return err
}

// forget frees the memory. It must not be called during a read.
func (e *edges) forget() { e.head, e.tail = nil, nil }

func (e *edges) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	begin := e.Size() - int64(len(e.tail))
	switch {
	case off >= 0 && off+int64(len(p)) <= int64(len(e.head)):
		return copy(p, e.head[off:]), nil
	case off >= begin && off-begin+int64(len(p)) <= int64(len(e.tail)):
		return copy(p, e.tail[off-begin:]), nil
	}
	return e.Source.ReadAt(ctx, p, off)
}
