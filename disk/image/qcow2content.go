package image

import (
	"context"
	"errors"

	"kubevirt.io/disk/disk/qcow2"
)

// qcow2Content is a qcow2 image as the content of a layer.
type qcow2Content struct {
	*qcow2.Image
	of    *layer
	below *layer // the backing file, or nil
}

// openQcow2 validates a layer's file as a qcow2 image.
func openQcow2(ctx context.Context, l *layer, maxVirtualSize int64) (content, error) {
	img, err := qcow2.Open(ctx, l.bytes, l.bytes.Size(), qcow2.Options{
		MaxVirtualSize: maxVirtualSize, WillRead: l.bytes.WillRead, Parallel: l.bytes.Parallel(),
	})
	if err != nil {
		return nil, err
	}
	return &qcow2Content{Image: img, of: l}, nil
}

// refuseQcow2 is what to tell about an image that openQcow2 does not accept: it cannot be read, is not supported, or is damaged.
func refuseQcow2(name string, err error) error {
	e := &Error{Name: name, Format: FormatQcow2, Err: err}
	switch format := new(qcow2.FormatError); {
	case !errors.As(err, &format):
		return refuseUnread(name, FormatQcow2, err)
	case format.Action != "":
		e.Reason, e.Action = "cannot be served: "+format.Why, format.Action
	default:
		e.Reason, e.Action = "is not valid: "+format.Why, "check it with \"qemu-img check\", and fetch or build it again"
	}
	return e
}

func (c *qcow2Content) extent(ctx context.Context, off, length int64) (int64, extentKind, error) {
	n, kind, err := c.Extent(ctx, off, length)
	if err != nil {
		return 0, extentHole, err
	}
	n = min(n, length)
	switch kind {
	case qcow2.KindZero:
		return n, extentHole, nil
	case qcow2.KindCompressed:
		return n, extentCompressed, nil
	case qcow2.KindUnallocated:
		return n, extentBelow, nil
	default:
		return n, extentPlain, nil
	}
}

func (c *qcow2Content) stored(ctx context.Context, off, length int64) (at, n int64, ok bool) {
	return c.Stored(ctx, off, length)
}

func (c *qcow2Content) usage() usage {
	info := c.Info()
	return usage{plain: info.PlainSize, compressed: info.CompressedSize}
}

func (c *qcow2Content) slow(off int64) (slow, below bool) {
	need, ok := c.Need(off, 1)
	return need.Kind == qcow2.KindCompressed && need.Length > 0,
		ok && need.Kind == qcow2.KindUnallocated
}

func (c *qcow2Content) setBelow(l *layer) {
	c.below = l
	c.SetBacking(l, l.size)
}

func (c *qcow2Content) waits(off, length int64) bool {
	for off, end := off, off+length; off < end; {
		need, ok := c.Need(off, end-off)
		switch {
		case !ok:
			return true
		case need.Kind == qcow2.KindUnallocated:
			if c.below != nil && c.below.waits(off, need.N) {
				return true
			}
		case need.Length > 0 && !c.of.bytes.Here(need.Off, need.Length):
			return true
		}
		off += need.N
	}
	return false
}

func (c *qcow2Content) header() header {
	info := c.Info()
	return header{version: info.Version, clusterSize: info.ClusterSize, compression: info.Compression,
		backingName: info.BackingFile, backingFormat: info.BackingFormat}
}
