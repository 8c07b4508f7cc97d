package image

import (
	"context"
	"errors"

	"kubevirt.io/disk/disk/foreign"
	"kubevirt.io/disk/disk/qcow2"
)

// foreignContent is the content of a layer with another program's format.
type foreignContent struct{ *foreign.Image }

func openForeign(ctx context.Context, l *layer, maxVirtualSize int64) (content, error) {
	im, err := foreign.Open(ctx, foreign.Format(l.format), l.bytes, l.bytes.Size(),
		foreign.Options{MaxVirtualSize: maxVirtualSize})
	if own, ok := errors.AsType[*foreign.Error](err); ok {
		return nil, &Error{Name: l.name, Format: l.format, Reason: own.Reason, Action: own.Action,
			Err: err}
	}
	if err != nil {
		return nil, refuseUnread(l.name, l.format, err)
	}
	return foreignContent{im}, nil
}

func (c foreignContent) extent(ctx context.Context, off, length int64) (int64, extentKind, error) {
	at, n, err := c.Run(ctx, off, length)
	if at < 0 {
		return n, extentHole, err
	}
	return n, extentPlain, err
}

func (c foreignContent) usage() usage { return usage{plain: c.Stored()} }

func (c foreignContent) stored(ctx context.Context, off, length int64) (at, n int64, ok bool) {
	at, n, err := c.Run(ctx, off, length)
	return at, n, err == nil && at >= 0
}

func (c foreignContent) slow(int64) (slow, below bool) { return false, false }

func (c foreignContent) setBelow(*layer) {} // a parent is refused

func (c foreignContent) header() header { return header{} }

type qcow2Content struct{ *qcow2.Image }

// deepCacheBytes limits the memory for tables and decoded clusters of a file deep in a chain.
// Bytes.
const deepCacheBytes = 2 << 20

// openQcow2 validates a layer's file as a qcow2 image.
func openQcow2(ctx context.Context, l *layer, maxVirtualSize int64, deep bool) (content, error) {
	cache := int64(0)
	if deep {
		cache = deepCacheBytes
	}
	img, err := qcow2.Open(ctx, l.bytes, l.bytes.Size(), qcow2.Options{
		MaxVirtualSize: maxVirtualSize, WillRead: l.bytes.WillRead, Parallel: l.bytes.Parallel(),
		CacheBytes: cache,
	})
	if err != nil {
		return nil, err
	}
	return qcow2Content{img}, nil
}

// refuseQcow2 explains why openQcow2 does not accept an image: it cannot be read, is not supported,
// or is damaged.
func refuseQcow2(name string, err error) error {
	e := &Error{Name: name, Format: FormatQcow2, Err: err}
	switch format := new(qcow2.FormatError); {
	case !errors.As(err, &format):
		return refuseUnread(name, FormatQcow2, err)
	case format.Action != "":
		e.Reason, e.Action = "cannot be served: "+format.Why, format.Action
	default:
		e.Reason, e.Action = "is not valid: "+format.Why,
			"check it with \"qemu-img check\", and fetch or build it again"
	}
	return e
}

func (c qcow2Content) extent(ctx context.Context, off, length int64) (int64, extentKind, error) {
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

func (c qcow2Content) stored(ctx context.Context, off, length int64) (at, n int64, ok bool) {
	return c.Stored(ctx, off, length)
}

func (c qcow2Content) usage() usage {
	info := c.Info()
	return usage{plain: info.PlainSize, compressed: info.CompressedSize}
}

func (c qcow2Content) slow(off int64) (slow, below bool) { return c.Decodes(off) }

func (c qcow2Content) setBelow(l *layer) { c.SetBacking(l, l.size) }

func (c qcow2Content) header() header {
	info := c.Info()
	return header{version: info.Version, clusterSize: info.ClusterSize,
		compression: info.Compression,
		backingName: info.BackingFile, backingFormat: info.BackingFormat}
}
