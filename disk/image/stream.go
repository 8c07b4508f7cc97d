package image

import (
	"context"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/internal/words"
)

// Stream writes the image as a raw disk to w, from beginning to end, including zeros: a pipe has no
// holes. Several goroutines decode compressed data, some chunks ahead of the writing. If the image
// cannot be read or changes meanwhile, this is an error, and w has received part of the disk. p may
// be nil.
func Stream(ctx context.Context, img *Image, w io.Writer, p *Progress) error {
	c := newCopier(img, nil, p, 0)
	c.progress.Start(img.Size(), img.use.total())
	group, ctx := errgroup.WithContext(ctx)
	pieces := make(chan *piece, c.workers)
	unused := make(chan []byte, c.workers)
	group.Go(func() error {
		defer close(pieces)
		for off := int64(0); off < img.Size(); off += c.chunk {
			part := &piece{off: off, length: min(c.chunk, img.Size()-off),
				ready: make(chan struct{})}
			select {
			case pieces <- part:
			case <-ctx.Done():
				return ctx.Err()
			}
			group.Go(func() error { return part.read(ctx, c, unused) })
		}
		return nil
	})
	group.Go(func() error {
		for part := range pieces {
			select {
			case <-part.ready:
			case <-ctx.Done(): // perhaps because a read failed
				return ctx.Err()
			}
			if _, err := w.Write(part.content); err != nil {
				return fmt.Errorf("writing the content of %s: %w", words.Name(img.Name()), err)
			}
			c.progress.add(part.length, part.data)
			select {
			case unused <- part.content[:c.chunk]:
			default:
			}
		}
		return nil
	})
	err := group.Wait()
	if err == nil {
		err = img.CheckUntouched()
	}
	if err == nil {
		c.progress.Finish()
	}
	return err
}

// piece is a part of the stream. It is read while the pieces before it are written.
type piece struct {
	off, length int64
	ready       chan struct{} // closed when the rest is there
	content     []byte
	data        int64 // bytes of the piece that the image stores
}

func (p *piece) read(ctx context.Context, c *copier, unused <-chan []byte) error {
	var buf []byte
	select {
	case buf = <-unused:
	default:
		buf = make([]byte, c.chunk)
	}
	p.content = buf[:p.length]
	if n, err := c.img.ReadAt(ctx, p.content, p.off); n < len(p.content) {
		return err
	}
	err := c.img.top.walk(ctx, p.off, p.off+p.length, func(_, n int64, kind extentKind) error {
		if kind != extentHole {
			p.data += n
		}
		return nil
	})
	if err == nil {
		close(p.ready)
	}
	return err
}
