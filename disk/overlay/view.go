package overlay

import (
	"context"
	"sync/atomic"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/rawfile"
)

// View is a snapshot as a read-only disk. It has the size that the disk had then.
type View struct {
	layer  atomic.Pointer[Disk]
	size   int64
	tree   *Tree
	of     disk.Snapshot
	closed atomic.Bool
	done   func()
}

var (
	_ disk.Disk      = (*View)(nil)
	_ disk.Extenter  = (*View)(nil)
	_ disk.Estimator = (*View)(nil)
	_ disk.Layered   = (*View)(nil)
)

// newView makes a disk of a snapshot's layer. Close calls done once. While the view is open, only
// Replace may put another layer in its place.
func newView(t *Tree, s *snapshot, done func()) *View {
	v := &View{size: s.Size, done: done, tree: t, of: disk.Snapshot{Name: s.Name, ID: s.ID}}
	v.layer.Store(s.on.disk)
	return v
}

// Replace puts a layer with the same content in the place of the former one.
func (v *View) Replace(layer *Disk) { v.layer.Store(layer) }

// Far reports whether the image is far away: see disk.Far.
func (v *View) Far() bool { return v.layer.Load().parallel > 1 }

// Snapshot is the snapshot that the view shows.
func (v *View) Snapshot() disk.Snapshot { return v.of }

// Size is the size of the disk when the snapshot was taken.
func (v *View) Size() int64 { return v.size }

// ReadAt calls Disk.ReadAt.
func (v *View) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off < 0 || off > v.size-int64(len(p)) {
		return 0, rawfile.OutOfRange("read", off, int64(len(p)), v.size)
	}
	err = v.tree.stack.retry(&v.layer, func(o *Disk) (err error) {
		n, err = o.read(ctx, p, off)
		return err
	})
	return n, err
}

// Extent calls Disk.Extent.
func (v *View) Extent(ctx context.Context, off, length int64) (e disk.Extent, err error) {
	if off < 0 || length <= 0 || off > v.size-length {
		return e, rawfile.OutOfRange("extent", off, length, v.size)
	}
	err = v.tree.stack.retry(&v.layer, func(o *Disk) (err error) {
		e, err = o.Extent(ctx, off, length)
		return err
	})
	return e, err
}

// Depth calls Disk.Depth.
func (v *View) Depth(ctx context.Context, off, length int64) (depth int, n int64, err error) {
	if off < 0 || length <= 0 || off > v.size-length {
		return 0, 0, rawfile.OutOfRange("depth", off, length, v.size)
	}
	err = v.tree.stack.retry(&v.layer, func(o *Disk) (err error) {
		depth, n, err = o.Depth(ctx, off, length)
		return err
	})
	return depth, n, err
}

// Slow calls Disk.Slow.
func (v *View) Slow(off int64) bool { return v.layer.Load().Slow(off) }

// WriteAt returns disk.ErrReadOnly.
func (v *View) WriteAt(context.Context, []byte, int64) (int, error) { return 0, disk.ErrReadOnly }

// Flush does nothing: there are no writes.
func (v *View) Flush() error { return nil }

// Close releases the layer. Calls after the first do nothing.
func (v *View) Close() error {
	if !v.closed.Swap(true) {
		v.done()
	}
	return nil
}
