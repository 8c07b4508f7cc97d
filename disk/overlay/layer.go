package overlay

import (
	"context"
	"errors"

	"kubevirt.io/disk/disk"
)

// errFrozen says that a layer does not change any more. A Stack makes the change again in its new
// top.
var errFrozen = errors.New("the layer is frozen")

// NewWhole makes a Disk of a file that is the whole disk, so that layers can be put above it.
func NewWhole(file File, opt Options) *Disk {
	o := newDisk(file, noImage{}, newBlockMap(0), newMapStore(0), 0, opt)
	o.whole = true
	o.mapless.Store(true)
	o.base.drop()
	return o
}

// noImage is the image of a disk without one.
type noImage struct{}

func (noImage) ReadAt(context.Context, []byte, int64) (int, error) { return 0, nil }

func (noImage) Size() int64 { return 0 }

func (noImage) Parallel() int { return 1 }

func (noImage) Extent(_ context.Context, _, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length}, nil
}

// NewLayer puts a file above the first bytes of another disk, as many as the map was made for.
// Those bytes do not change any more. All content behind them is the file's own. All layers of a
// disk share a guest watch and a trail, and fail together. m was begun with BeginLayer, and the
// layer closes it.
func NewLayer(file File, lower *Disk, m *Map, opt Options) *Disk {
	return newLayer(file, lower, m.opt.ImageSize, m.blocks, m.files, opt)
}

// newLayer is NewLayer with the parts of a map.
func newLayer(file File, lower *Disk, floor int64, m *blockMap, maps *mapStore,
	opt Options) *Disk {
	b := &below{floor: floor}
	b.parallel = lower.parallel
	o := newDisk(file, b, m, maps, m.blocks*granuleFor(floor), opt)
	b.of = o
	o.floor = floor
	o.lower.Store(lower)
	o.fate, o.watch, o.trail = lower.fate, lower.watch, lower.trail
	return o
}

// below is what a layer uses as its image: the layers below it.
type below struct {
	of       *Disk
	floor    int64
	parallel int
}

func (b *below) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return b.of.lower.Load().read(ctx, p, off)
}

func (b *below) Size() int64 { return b.floor }

func (b *below) Parallel() int { return b.parallel }

func (b *below) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	return b.of.lower.Load().Extent(ctx, off, length)
}

// Slow implements disk.Estimator.
func (b *below) Slow(off int64) bool { return off < b.floor && b.of.lower.Load().Slow(off) }

// find returns the layer that decides about the bytes from off on, whether they are in its file or
// in its image, and for how many of them that is so, at most length. from is nil if the bytes are
// zeros because the disk was smaller below.
func (o *Disk) find(off, length int64) (from *Disk, own bool, n int64) {
	own, n = o.run(off, length)
	for !own {
		lower := o.lower.Load()
		if lower == nil {
			break
		}
		if off >= o.floor {
			return nil, false, n
		}
		own, n = lower.run(off, min(n, o.floor-off))
		o = lower
	}
	return o, own, n
}

// enter begins a change of the guest, and leave ends it. It returns errFrozen if the layer is
// frozen.
func (o *Disk) enter() error {
	o.gate.RLock()
	if o.frozen {
		o.gate.RUnlock()
		return errFrozen
	}
	return nil
}

func (o *Disk) leave() { o.gate.RUnlock() }

// SetLower replaces the layer below by another with the same content.
func (o *Disk) SetLower(lower *Disk) { o.lower.Store(lower) }

// Settle flushes a frozen layer. From then on a Flush of the layers above leaves this layer out.
func (o *Disk) Settle() error {
	o.gate.RLock()
	frozen, thaws := o.frozen, o.thaws
	o.gate.RUnlock()
	if err := o.Flush(); err != nil {
		return err
	}
	o.gate.RLock()
	defer o.gate.RUnlock()
	if frozen && o.thaws == thaws { // the layer was not thawed during the flush
		o.settled.Store(true)
	}
	return nil
}

// Retire closes the files of a layer whose content is not needed any more. Calls that still read it
// fail, and a Stack makes them again.
func (o *Disk) Retire() error {
	o.flushMu.Lock()
	defer o.flushMu.Unlock()
	o.retired = true
	return errors.Join(o.file.Close(), o.maps.close())
}

// Grow enlarges the file by a hole. One call at a time.
func (o *Disk) Grow(size int64) error {
	file, ok := o.file.(interface{ Grow(int64) error })
	if !ok {
		return errors.ErrUnsupported
	}
	return o.judge(file.Grow(size))
}

// Own returns roughly how many bytes of the disk are in this layer, with holes.
func (o *Disk) Own() int64 {
	return o.mapped - o.blocks.clear.Load()*o.granule + max(0, o.Size()-o.mapped)
}

// Masked returns roughly how many of the layer's own bytes are hidden by the layer above.
func (o *Disk) Masked(above *Disk) (n int64) {
	for off := int64(0); off < o.Size(); {
		own, length := above.run(off, o.Size()-off)
		for end := off + length; off < end; {
			mine, part := o.run(off, end-off)
			if own && mine {
				n += part
			}
			off += part
		}
	}
	return n
}
