package overlay

import (
	"context"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
)

// Extent describes what is allocated in the file or stored in the image. Concurrency: as Disk.
func (o *Disk) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	if off < 0 || length <= 0 || off > o.Size()-length {
		return disk.Extent{}, rawfile.OutOfRange("extent", off, length, o.Size())
	}
	own, n := o.run(off, length)
	if own {
		return o.file.Extent(ctx, off, n)
	}
	base := o.base.begin()
	if base == nil {
		return o.file.Extent(ctx, off, n)
	}
	defer o.base.end()
	if off >= base.Size() {
		return disk.Extent{Length: n}, nil
	}
	return base.Extent(ctx, off, min(n, base.Size()-off))
}

// Depth tells what is in the file and what in the image. Concurrency: as Disk.
//
// For a hole of the file, it asks the image, too. There are two kinds of such holes: blocks that
// the image does not store, which are marked from the beginning, and blocks that the guest has
// discarded. Only the latter differ from the image.
func (o *Disk) Depth(ctx context.Context, off, length int64) (depth int, n int64, err error) {
	if off < 0 || length <= 0 || off > o.Size()-length {
		return 0, 0, rawfile.OutOfRange("depth", off, length, o.Size())
	}
	own, n := o.run(off, length)
	if lower := o.lower.Load(); lower != nil {
		return o.depthOver(ctx, lower, own, off, n)
	}
	base := o.base.begin()
	if base == nil {
		return disk.DepthOwn, n, nil
	}
	defer o.base.end()
	if own {
		e, err := o.file.Extent(ctx, off, n)
		if err != nil || e.Data {
			return disk.DepthOwn, e.Length, err
		}
		n = e.Length
	}
	if off >= base.Size() {
		return disk.DepthNone, n, nil
	}
	e, err := base.Extent(ctx, off, min(n, base.Size()-off))
	switch {
	case err != nil:
		return 0, 0, err
	case !e.Data:
		depth = disk.DepthNone
	case own:
		depth = disk.DepthOwn
	default:
		depth = disk.DepthImage
	}
	return depth, e.Length, nil
}

// depthOver is Depth for a layer. A range that it has discarded is its own if a lower layer had
// content there.
func (o *Disk) depthOver(ctx context.Context, lower *Disk, own bool, off, length int64) (depth int,
	n int64, err error) {
	if own {
		e, err := o.file.Extent(ctx, off, length)
		if err != nil || e.Data {
			return disk.DepthOwn, e.Length, err
		}
		length = e.Length
	}
	if off >= o.floor {
		return disk.DepthNone, length, nil
	}
	depth, n, err = lower.Depth(ctx, off, min(length, o.floor-off))
	if own && depth == disk.DepthImage {
		depth = disk.DepthOwn
	}
	return depth, n, err
}
