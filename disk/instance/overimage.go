package instance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/overlay"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// overImage makes the disk of every mode except CopyNone: of the file of an earlier start if that
// still fits, or of a new one, above the image until the disk is complete.
func (o *opening) overImage(ctx context.Context) (*Instance, error) {
	v := o.judge(ctx)
	if v.what == remake && o.img != nil {
		v = o.lookAside(ctx, v)
	}
	switch v.what {
	case keep:
		inst, err := o.resume(ctx, v.state)
		if damaged := new(overlay.DamagedError); !o.dir.persistent && errors.As(err, &damaged) {
			return o.remake(ctx, damaged.Error())
		}
		return inst, err
	case remake:
		if o.img == nil && o.opt.Empty {
			return o.makeEmpty()
		}
		return o.remake(ctx, v.reason)
	default:
		return nil, v.err
	}
}

// resume serves the disk of an earlier start again.
func (o *opening) resume(ctx context.Context, s *state) (*Instance, error) {
	o.dir.layered = s.Version == layeredVersion
	grown, err := o.adjust(s)
	if err != nil {
		return nil, err
	}
	o.log.Info("keeping the existing disk, with what was written to it",
		zap.String("disk", o.dir.disk()), zap.String("serial", s.Identity.Serial),
		zap.Time("created", s.Created), zap.Bool("complete", s.Complete))
	inst, err := o.assemble(ctx, s, false)
	if err != nil {
		return nil, err
	}
	inst.kept, inst.Grown = true, grown
	return inst, nil
}

// remake makes a new disk. reason says why an existing one cannot be kept; it is "" if there was
// none.
func (o *opening) remake(ctx context.Context, reason string) (*Instance, error) {
	begin := time.Now()
	if reason != "" && (o.dir.persistent || o.opt.Leftovers != LeftoversKeep) {
		o.log.Warn("the existing disk is not kept: making it of the image again",
			zap.String("reason", reason), zap.String("disk", o.dir.disk()))
	}
	s, err := o.create(ctx, reason)
	if err != nil {
		return nil, err
	}
	inst, err := o.assemble(ctx, s, true)
	if err != nil {
		return nil, err
	}
	o.log.Info("made a disk of the image", zap.String("format", string(o.img.Format())),
		zap.Int64("size", inst.Size()), zap.Int64("data", o.img.DataSize()),
		zap.String("disk", o.dir.disk()), zap.String("serial", inst.Identity.Serial),
		zap.Duration("duration", time.Since(begin)))
	return inst, nil
}

// assemble opens the file and, while the disk is not complete, puts it above the image. It makes
// the maps of a new disk before the file: a file without maps looks like a disk that has lost them.
func (o *opening) assemble(ctx context.Context, s *state, fresh bool) (*Instance, error) {
	if s.Complete {
		return o.assembleComplete(s)
	}
	m, err := o.openMap(ctx, s, fresh)
	if err != nil {
		return nil, err
	}
	if fresh {
		err = o.spaceError(o.createFile(s))
	}
	var file *rawfile.File
	if err == nil {
		file, err = o.openFile(rawfile.Options{Durable: o.durable(), Private: true})
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	over := overlay.New(file, o.img, m, overlay.Options{ReadOnly: o.opt.ReadOnly,
		CopyReads: o.opt.Mode == CopyOnRead, Unit: o.img.CopyUnit(), Reads: o.opt.Reads})
	o.opt.Progress.Follow(over.Size(), over.Copied)
	inst, err := o.instance(over, s)
	if err != nil {
		return nil, err
	}
	inst.copies = startBackground(o, over, file, s)
	return inst, nil
}

// openFile opens the disk's own file, and locks it: the lock of the directory keeps out only other
// daemons, not programs that open the file itself.
func (o *opening) openFile(opt rawfile.Options) (*rawfile.File, error) {
	opt.Killed = o.dir.killed
	file, err := rawfile.Open(o.dir.disk(), opt)
	if err != nil {
		return nil, err
	}
	if err := lockFile(file.File, opt.ReadOnly); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	o.file = file.File
	o.rememberOwn(file.File)
	return file, nil
}

// instance makes the Instance of a disk and its state. It closes the disk after an error.
func (o *opening) instance(bottom *overlay.Disk, s *state) (*Instance, error) {
	tree, err := o.assembleLayers(bottom, s)
	if err != nil {
		return nil, errors.Join(err, bottom.Close())
	}
	return &Instance{Disk: tree.Stack(), Identity: s.Identity, BlockSize: s.blockSize(),
		path: o.dir.disk(), tree: tree, ReadOnly: o.opt.ReadOnly, content: s.Map,
		durable: o.durable()}, nil
}

// assembleComplete opens a file that is the whole disk.
func (o *opening) assembleComplete(s *state) (*Instance, error) {
	// A process killed after the disk was complete may have left the maps.
	if err := o.dir.removeMaps(); err != nil {
		o.log.Warn("the map of the complete disk could not be removed", zap.Error(err))
	}
	file, err := o.openFile(
		rawfile.Options{ReadOnly: o.opt.ReadOnly, Durable: o.durable(), Private: true})
	if err != nil {
		return nil, err
	}
	o.opt.Progress.Start(s.Size, 0)
	o.opt.Progress.Finish()
	return o.instance(overlay.NewWhole(file, overlay.Options{ReadOnly: o.opt.ReadOnly}), s)
}

// openMap opens the map of a disk and its files. If the durability changes, it saves that in the
// state at the end.
func (o *opening) openMap(ctx context.Context, s *state, fresh bool) (*overlay.Map, error) {
	volume, err := volumeID(o.dir.path)
	if err != nil {
		return nil, o.unread(err)
	}
	opt := overlay.MapOptions{Live: o.dir.liveMap(), Durable: o.dir.durableMap(),
		ID: [16]byte(s.mapID()), ImageSize: s.ImageSize, Boot: bootID(), Volume: volume,
		WasDurable: s.Durable, IsDurable: o.durable(), Log: o.log}
	var m *overlay.Map
	if fresh {
		m = overlay.NewMap(opt)
	} else if m, err = overlay.LoadMap(opt); err != nil {
		return nil, o.damaged(err)
	}
	if err := o.beginMap(ctx, m, s, fresh); err != nil {
		return nil, errors.Join(o.spaceError(err), m.Close())
	}
	return m, nil
}

func (o *opening) beginMap(ctx context.Context, m *overlay.Map, s *state, fresh bool) error {
	if !fresh && o.durable() && !s.Durable {
		if err := o.dir.syncContent(s.Map); err != nil {
			return err
		}
	}
	if err := m.Begin(ctx, o.img); err != nil || s.Durable == o.durable() {
		return err
	}
	// If the disk stops being durable, the state must say so before anything is written without a
	// flush. Before that, the live map must exist, because later starts read no other map.
	s.Durable = o.durable()
	return o.dir.saveState(s, true)
}

// create makes the state of a new disk. It is made before the file: a file without a state looks
// like a complete disk.
func (o *opening) create(ctx context.Context, reason string) (*state, error) {
	if o.img == nil {
		return nil, &PersistentError{Path: o.dir.disk(),
			Reason: "does not exist yet, and there is no image to make it from",
			Action: "add the image to the container"}
	}
	if err := o.checkImageBlocks(ctx); err != nil {
		return nil, err
	}
	if err := o.makeWay(reason); err != nil {
		return nil, err
	}
	o.dir.layered = false
	if o.opt.Mode == CopyClone {
		if err := image.CheckSpace(ctx, o.img, o.dir.path, 0); err != nil {
			return nil, err
		}
	}
	s := o.newState(max(o.img.Size(), o.opt.Size))
	s.ImageSize, s.Chain = o.img.Size(), o.img.Unhashed()
	return s, o.spaceError(o.dir.saveState(s, s.Durable))
}

// newState is the state of a new disk of that size.
func (o *opening) newState(size int64) *state {
	return &state{Version: stateVersion, Image: o.name, Owner: o.owner(), Mode: o.opt.Mode,
		Size: size, BlockSize: o.newBlockSize(), Identity: o.identity(newIdentity()),
		Created: time.Now().UTC(), Durable: o.durable(), Map: newMapID(), Boot: bootID(),
		LUN: o.opt.LUN}
}

// createFile makes the file of a new disk, a hole, and records that it was made.
func (o *opening) createFile(s *state) error {
	err := makeFile(o.dir.disk(), s.Size, s.Durable)
	if err != nil {
		return o.tooLarge(err, s.Size)
	}
	s.Made = true
	err = o.dir.saveState(s, s.Durable)
	if s.stale = disk.IsNoSpace(err); s.stale {
		return nil // the state is saved later
	}
	return err
}

// makeFile makes a file that is one hole.
func makeFile(path string, size int64, synced bool) error {
	out, err := durable.Create(path, 0o600)
	if err != nil {
		return err
	}
	err = osfile.Retry(func() error { return out.File.Truncate(size) })
	if err == nil && synced {
		err = osfile.Retry(out.File.Sync)
	}
	if err = out.Finish(err); err == nil && synced {
		err = durable.SyncParent(path)
	}
	return err
}

// adjust changes the state of a kept disk to the current settings: size, identity, mode and
// durability.
func (o *opening) adjust(s *state) (grown bool, err error) {
	before, was := *s, s.Size
	st, err := os.Lstat(o.dir.disk())
	if err != nil {
		return false, err
	}
	layers, err := o.layersSize(s)
	if err != nil {
		return false, err
	}
	// Another program may have enlarged the file. The new part reads as zeros. A partial block at
	// the end is completed below.
	block, file := int64(s.blockSize()), max(st.Size(), layers)
	if file > maxSize {
		return false, overMax(o.name, file)
	}
	s.Size = max(s.Size, (file+block-1)/block*block)
	if o.opt.Size != 0 {
		if o.opt.Size%block != 0 {
			return false, notWhole(o.name, o.opt.Size, block)
		}
		if o.opt.Size < s.Size {
			return false, &SizeError{Image: o.name, Size: o.opt.Size,
				Reason: fmt.Sprintf("is less than the %d bytes (%s) that the disk has already, "+
					"and a disk is never made smaller", s.Size, words.Bytes(s.Size))}
		}
		s.Size = o.opt.Size
	}
	if st.Size() < s.Size {
		if err := o.growFile(o.dir.disk(), s.Size); err != nil {
			return false, o.spaceError(err)
		}
	}
	s.Mode, s.Owner, s.Identity = o.opt.Mode, o.owner(), o.identity(s.Identity)
	s.Boot, s.LUN, s.Made = bootID(), o.lun(s), true
	switch {
	case !s.Complete: // openMap has more to do
	case !o.durable():
		s.Durable = false // a run without flushes makes it false
	case !s.Durable:
		if err := o.dir.syncContent(s.Map); err != nil {
			return false, err
		}
		s.Durable = true
	}
	same := s.Mode == before.Mode && s.Owner == before.Owner && s.Identity == before.Identity &&
		s.LUN == before.LUN && s.Size == before.Size && s.Durable == before.Durable && before.Made
	// A durable disk does not depend on the boot.
	if same && (s.Durable || s.Boot == before.Boot) && !s.stale {
		return false, nil
	}
	// If the disk stops being durable, the state must say so before anything is written without a
	// flush.
	err = o.dir.saveState(s, s.Durable || before.Durable)
	s.stale = err != nil
	if disk.IsNoSpace(err) && s.Durable == before.Durable && len(s.Chain) > 0 {
		// If the disk were refused, the volume would stay full. The old state still fits the disk:
		// the hash identifies the image, the file gives the size, and the next start has the
		// settings, too. But a disk without a chain may have no state yet.
		o.log.Warn("no space is left to save the disk's settings: it is served with them, and "+
			"they are saved later", zap.String("disk", o.dir.disk()), zap.Error(err))
		err = nil
	}
	return s.Size != was, o.spaceError(err)
}

// rememberOwn marks the disk's own file as raw. The mark is for programs that take the file for an
// image: inspect and convert, or a daemon whose directory of images is the volume. The disk itself
// does not depend on it.
func (o *opening) rememberOwn(file *os.File) {
	beside := ""
	if o.dir.persistent {
		beside = o.dir.path
	}
	if err := image.MarkRaw(file, beside); err != nil {
		o.log.Debug("cannot remember with the file that the disk is raw",
			zap.String("disk", file.Name()), zap.Error(err))
	}
}

// growFile enlarges a file by a hole.
func (o *opening) growFile(path string, size int64) error {
	f, err := osfile.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	err = o.tooLarge(osfile.Retry(func() error { return f.Truncate(size) }), size)
	if err == nil && o.durable() {
		err = osfile.Retry(f.Sync)
	}
	return errors.Join(err, f.Close())
}

// tooLarge explains an error of setting the size of a file. A file system may limit it to less than
// its space: ext4 to 16 TiB.
func (o *opening) tooLarge(err error, size int64) error {
	return image.NoRoom(err, o.dir.path, "the disk of "+words.Name(o.name), size)
}

// syncFile makes a file durable that was written without a sync.
func syncFile(path string) error {
	f, err := osfile.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(osfile.Retry(f.Sync), f.Close())
}

// damaged says why a disk is refused whose map cannot be read.
func (o *opening) damaged(err error) error {
	if damaged := new(overlay.DamagedError); !errors.As(err, &damaged) {
		return o.unread(err)
	}
	if !o.dir.persistent {
		return err // the disk is made again
	}
	return fmt.Errorf("%w: %w", o.refusal("is not complete, and "+err.Error(), restoreVolume), err)
}

// makeEmpty makes a disk that reads as zeros. It is complete, and needs no image.
func (o *opening) makeEmpty() (*Instance, error) {
	if o.opt.Size == 0 {
		return nil, &SizeError{Image: o.name, Reason: "is not valid: an empty disk needs a size"}
	}
	if block := int64(max(o.opt.BlockSize, disk.SectorSize)); o.opt.Size%block != 0 {
		return nil, notWhole(o.name, o.opt.Size, block)
	}
	if err := o.dir.clear(); err != nil {
		return nil, err
	}
	// The state is made first: a file without one looks like a disk that came with the volume.
	s := o.newState(o.opt.Size)
	s.Complete, s.Chain = true, []image.Fingerprint{}
	if err := o.spaceError(o.dir.saveState(s, s.Durable)); err != nil {
		return nil, err
	}
	if err := o.spaceError(o.createFile(s)); err != nil {
		return nil, err
	}
	inst, err := o.assembleComplete(s)
	if err == nil {
		o.log.Info("made an empty disk", zap.Int64("size", s.Size),
			zap.String("disk", o.dir.disk()), zap.String("serial", s.Identity.Serial))
	}
	return inst, err
}
