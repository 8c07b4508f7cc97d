package image

import (
	"context"
	"errors"

	"kubevirt.io/disk/disk/foreign"
)

// foreignContent makes an image of another program's format the content of a layer.
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
