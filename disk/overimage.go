package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// overImage makes the disk of every mode but CopyNone: the file of an earlier start where it is still the right one, or
// a new one, with the image below it until it is complete.
func (o *opening) overImage(ctx context.Context) (*Instance, error) {
	begin := time.Now()
	s, reason, err := o.existing(ctx)
	if err != nil {
		return nil, err
	}
	kept, grown := s != nil, false
	if kept {
		if grown, err = o.adjust(s); err != nil {
			return nil, err
		}
		o.log.Info("keeping the existing disk, with what was written to it", zap.String("disk", o.dir.disk()),
			zap.String("serial", s.Identity.Serial), zap.Time("created", s.Created), zap.Bool("complete", s.Complete))
	} else {
		if s, err = o.remake(ctx, reason); err != nil {
			return nil, err
		}
	}
	inst := &Instance{Identity: s.Identity, Path: o.dir.disk(), ReadOnly: o.opt.ReadOnly, Kept: kept, Grown: grown, Created: s.Created}
	err = o.assemble(inst, s)
	if damaged := new(damagedError); kept && !o.dir.persistent && errors.As(err, &damaged) {
		if s, err = o.remake(ctx, damaged.Error()); err == nil {
			kept, inst.Identity, inst.Kept, inst.Grown, inst.Created = false, s.Identity, false, false, s.Created
			err = o.assemble(inst, s)
		}
	}
	if err != nil {
		return nil, err
	}
	if !kept {
		o.log.Info("made a disk of the image", zap.String("format", string(o.img.format())), zap.Int64("size", inst.Size()),
			zap.Int64("data", o.img.use.total()), zap.String("disk", o.dir.disk()), zap.String("serial", inst.Identity.Serial),
			zap.Duration("duration", time.Since(begin)))
	}
	return inst, nil
}

// assemble opens the file and, while the disk is not complete, lays it over the image.
func (o *opening) assemble(inst *Instance, s *state) error {
	file, err := OpenFile(o.dir.disk(), FileOptions{ReadOnly: o.opt.ReadOnly && s.Complete, Durable: o.durable(), Private: true})
	if err != nil {
		return err
	}
	if s.Complete {
		o.opt.Progress.start(s.Size, 0)
		o.opt.Progress.finish()
		inst.Disk = file
		return nil
	}
	over, err := o.lay(file, s)
	if err != nil {
		return errors.Join(err, file.Close())
	}
	inst.Disk = over
	o.opt.Progress.follow(over)
	inst.copies = startBackground(o, over, s)
	return nil
}

// lay reads the maps and makes the overlay.
func (o *opening) lay(file *File, s *state) (*overlay, error) {
	m := newBlockMap(blocksOf(s.ImageSize))
	live, durable, err := o.openMaps(m, s)
	if err != nil {
		return nil, err
	}
	// Typed nil pointers would not be nil interfaces.
	maps := newMapStore(live, nil, len(m.pages))
	if durable != nil {
		maps = newMapStore(live, durable, len(m.pages))
		maps.allDirty(m)
	}
	over, err := newOverlay(file, o.img, m, maps, overlayOptions{readOnly: o.opt.ReadOnly, copyReads: o.opt.Mode == CopyOnRead, unit: o.img.copyUnit()})
	if err != nil {
		return nil, errors.Join(err, maps.close())
	}
	return over, nil
}

// openMaps reads what is known of the map and opens its files. The live file counts only within one boot: it is not
// flushed, so that after a crash of the machine it may be ahead of the data.
func (o *opening) openMaps(m *blockMap, s *state) (live, durable *os.File, err error) {
	header := mapHeader{granule: granuleFor(s.ImageSize), blocks: m.blocks, id: [16]byte(s.mapID())}
	current := header
	current.boot = bootID()
	if s.Durable {
		if err := mergeMap(o.dir.durableMap(), header, m); err != nil {
			return nil, nil, o.damaged(err)
		}
	}
	if current.boot != "" {
		// It is written anew below, so a disk that is durable can do without it.
		if err := mergeMap(o.dir.liveMap(), current, m); err != nil && !s.Durable {
			return nil, nil, o.damaged(err)
		}
	}
	if live, err = createMap(o.dir.liveMap(), current, m, false); err != nil {
		return nil, nil, o.spaceError(err)
	}
	if o.durable() {
		if durable, err = o.openDurableMap(header, m, s); err != nil {
			return nil, nil, errors.Join(o.spaceError(err), live.Close())
		}
	}
	return live, durable, nil
}

// openDurableMap opens the durable map of a disk that has one, or makes it durable first.
func (o *opening) openDurableMap(header mapHeader, m *blockMap, s *state) (*os.File, error) {
	if s.Durable {
		return openMap(o.dir.durableMap())
	}
	if err := syncFile(o.dir.disk()); err != nil {
		return nil, err
	}
	f, err := createMap(o.dir.durableMap(), header, m, true)
	if err != nil {
		return nil, err
	}
	s.Durable = true
	return f, s.save(o.dir.state(), true)
}

// mergeMap reads a map file; one that is not there is a *damagedError.
func mergeMap(path string, header mapHeader, m *blockMap) error {
	f, err := openMap(path)
	if errors.Is(err, fs.ErrNotExist) {
		return damagedMap("is missing")
	}
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	return readMap(f, st.Size(), header, m)
}

// remake makes a new disk in place of one that cannot be kept, for that reason; empty where there was none.
func (o *opening) remake(ctx context.Context, reason string) (*state, error) {
	if reason != "" {
		o.log.Warn("the existing disk is not kept, it is made of the image again", zap.String("reason", reason), zap.String("disk", o.dir.disk()))
	}
	return o.create(ctx)
}

// create makes a new disk and its state. The state comes first: a file without one is taken for a complete disk.
func (o *opening) create(ctx context.Context) (*state, error) {
	if o.img == nil {
		return nil, &PersistentError{Path: o.dir.disk(), Reason: "is not there yet, and there is no image to make it of", Action: "add the image to the container"}
	}
	if err := o.dir.clear(); err != nil {
		return nil, err
	}
	if o.opt.Mode == CopyClone {
		if err := checkSpace(ctx, o.img, o.dir.path, 0); err != nil {
			return nil, err
		}
	}
	s := &state{Version: stateVersion, Image: o.name, Mode: o.opt.Mode, Size: max(o.img.Size(), o.opt.Size), ImageSize: o.img.Size(),
		Identity: o.identity(newIdentity()), Created: time.Now().UTC(), Durable: o.durable(), Map: newMapID(), Boot: bootID(), Chain: o.img.unhashed()}
	return s, o.spaceError(o.createFiles(s))
}

func (o *opening) createFiles(s *state) error {
	if err := s.save(o.dir.state(), s.Durable); err != nil {
		return err
	}
	m := newBlockMap(blocksOf(s.ImageSize))
	header := mapHeader{granule: granuleFor(s.ImageSize), blocks: m.blocks, id: [16]byte(s.mapID())}
	if s.Durable {
		f, err := createMap(o.dir.durableMap(), header, m, true)
		if err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	header.boot = s.Boot
	f, err := createMap(o.dir.liveMap(), header, m, false)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	out, err := createPartial(o.dir.disk(), 0o600)
	if err != nil {
		return err
	}
	err = retry(func() error { return out.file.Truncate(s.Size) })
	if err == nil && s.Durable {
		err = retry(out.file.Sync)
	}
	if err = out.finish(err); err == nil && s.Durable {
		err = syncParent(o.dir.disk())
	}
	return err
}

// adjust brings a kept disk's state to what is asked for now: its size, identity, mode and durability.
func (o *opening) adjust(s *state) (grown bool, err error) {
	before, was := *s, s.Size
	st, err := os.Lstat(o.dir.disk())
	if err != nil {
		return false, err
	}
	// Someone may have enlarged the file; the new part reads as zeros.
	s.Size = max(s.Size, st.Size()/SectorSize*SectorSize)
	if o.opt.Size != 0 {
		if o.opt.Size < s.Size {
			return false, &SizeError{Image: o.name, Size: o.opt.Size, Reason: fmt.Sprintf("is less than the %d bytes (%s) that the disk has already, and a disk is never made smaller", s.Size, byteCount(s.Size))}
		}
		s.Size = o.opt.Size
	}
	if st.Size() < s.Size {
		if err := o.growFile(s.Size); err != nil {
			return false, o.spaceError(err)
		}
	}
	s.Mode, s.Identity = o.opt.Mode, o.identity(s.Identity)
	s.Boot = bootID()
	switch {
	case !o.durable():
		s.Durable = false // whoever runs it without flushing makes it so
	case s.Complete && !s.Durable:
		if err := syncFile(o.dir.disk()); err != nil {
			return false, err
		}
		s.Durable = true
	}
	if s.Mode == before.Mode && s.Identity == before.Identity && s.Size == before.Size && s.Boot == before.Boot && s.Durable == before.Durable && !s.stale {
		return s.Size != was, nil
	}
	s.stale = false
	// A disk that stops being durable has to say so before anything is written without a flush.
	return s.Size != was, o.spaceError(s.save(o.dir.state(), s.Durable || before.Durable))
}

// growFile makes the file larger, by a hole.
func (o *opening) growFile(size int64) error {
	f, err := os.OpenFile(o.dir.disk(), os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = retry(func() error { return f.Truncate(size) })
	if err == nil && o.durable() {
		err = retry(f.Sync)
	}
	return errors.Join(err, f.Close())
}

// syncFile makes a file durable that was written without that.
func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(retry(f.Sync), f.Close())
}

// damaged is why a disk whose map cannot be read is not served.
func (o *opening) damaged(err error) error {
	if !o.dir.persistent {
		return err // it is made again
	}
	return fmt.Errorf("%w: %w", o.refuse("is not complete, and "+err.Error(), "restore the volume from a backup, or remove "+PersistentName+"* in that directory to begin anew with the image"), err)
}
