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
	inst := &Instance{Identity: s.Identity, Path: o.dir.disk(), ReadOnly: o.opt.ReadOnly, Kept: kept, Grown: grown, Created: s.Created, content: s.Map}
	err = o.assemble(inst, s, !kept)
	if damaged := new(damagedError); kept && !o.dir.persistent && errors.As(err, &damaged) {
		if s, err = o.remake(ctx, damaged.Error()); err == nil {
			kept, inst.Identity, inst.Kept, inst.Grown, inst.Created, inst.content = false, s.Identity, false, false, s.Created, s.Map
			err = o.assemble(inst, s, true)
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

// assemble opens the file and, while the disk is not complete, lays it over the image. The file of a new disk is made after
// its maps: without them it would be taken for one that has lost them.
func (o *opening) assemble(inst *Instance, s *state, fresh bool) error {
	if s.Complete {
		return o.assembleComplete(inst, s)
	}
	m := newBlockMap(blocksOf(s.ImageSize))
	maps, stored, err := o.openMaps(m, s, fresh)
	if err != nil {
		return err
	}
	if fresh {
		err = o.spaceError(o.createFile(s))
	}
	var file *File
	if err == nil {
		file, err = OpenFile(o.dir.disk(), FileOptions{Durable: o.durable(), Private: true})
	}
	if err != nil {
		return errors.Join(err, maps.close())
	}
	over := newOverlay(file, o.img, m, maps, stored, overlayOptions{readOnly: o.opt.ReadOnly, copyReads: o.opt.Mode == CopyOnRead, unit: o.img.copyUnit()})
	inst.Disk = over
	o.opt.Progress.follow(over)
	inst.copies = startBackground(o, over, s)
	return nil
}

// assembleComplete opens a file that is the whole disk.
func (o *opening) assembleComplete(inst *Instance, s *state) error {
	// A process that was killed after the disk was complete may have left them.
	if err := o.dir.removeMaps(); err != nil {
		o.log.Warn("the map of the complete disk could not be removed", zap.Error(err))
	}
	file, err := OpenFile(o.dir.disk(), FileOptions{ReadOnly: o.opt.ReadOnly, Durable: o.durable(), Private: true})
	if err != nil {
		return err
	}
	o.opt.Progress.start(s.Size, 0)
	o.opt.Progress.finish()
	inst.Disk = file
	return nil
}

// openMaps reads what is known of the map, adds the image's holes, and opens the map's files, which then say the same. The
// live file counts only within one boot and one volume: it is not flushed, so that it may be ahead of the data after a crash of the machine, and
// in a snapshot of the volume.
func (o *opening) openMaps(m *blockMap, s *state, fresh bool) (maps *mapStore, stored int64, err error) {
	maps = newMapStore(len(m.pages))
	defer func() {
		if err != nil {
			err = errors.Join(err, maps.close())
		}
	}()
	header := mapHeader{granule: granuleFor(s.ImageSize), blocks: m.blocks, id: [16]byte(s.mapID())}
	current := header
	current.boot = bootID()
	if current.volume, err = volumeID(o.dir.path); err != nil {
		return maps, 0, o.unread(err)
	}
	if !fresh {
		if err := o.mergeMaps(header, current, m, maps, s); err != nil {
			return maps, 0, o.damaged(err)
		}
	}
	save := maps.save
	if fresh {
		save = nil // both files will be made of the map as it is then
	}
	if stored, err = markHoles(o.img, m, save); err != nil {
		return maps, 0, o.spaceError(err)
	}
	if maps.live == nil {
		live, err := createMap(o.dir.liveMap(), current, m, false)
		switch {
		case err == nil:
			maps.live = live // not before: a typed nil pointer would not be a nil interface
		case isNoSpace(err) && maps.durable != nil && o.durable():
			// A full volume has to be served, or the guest could not make room. What another machine has left of its own map would count again when the
			// disk comes back to it.
			if err := remove(o.dir.liveMap()); err != nil {
				return maps, 0, err
			}
			o.log.Warn("no space is left for the map of the disk: until the next start, a daemon that is killed loses what was not flushed", zap.Error(err))
		default:
			return maps, 0, o.spaceError(err)
		}
	}
	return maps, stored, o.spaceError(o.openDurableMap(header, m, maps, s, fresh))
}

// mergeMaps opens the map files of an existing disk and reads them.
func (o *opening) mergeMaps(header, current mapHeader, m *blockMap, maps *mapStore, s *state) error {
	if s.Durable {
		// An earlier process may have been killed before it synced what it had written, or its sync may have failed. That is read all the same, and the
		// kernel takes it for clean after such a failure: another sync would say that all is well, and only what is written again reaches storage.
		durable, err := mergeMap(o.dir.durableMap(), header, m, func(page int64, stored bool) {
			if stored {
				maps.taint(page)
			}
		})
		if err != nil {
			return err
		}
		maps.durable = durable
	}
	if current.boot == "" && s.Durable {
		return nil // nobody can tell which boot the live file is of
	}
	if !s.Durable {
		current.volume = anyVolume // without the live file there is no disk, and nobody takes snapshots of one that dies with the pod
	}
	live, err := mergeMap(o.dir.liveMap(), current, m, func(page int64, _ bool) { maps.taint(page) })
	switch {
	case err == nil && (s.Durable || !o.durable()):
		maps.live = live
	case err == nil:
		return live.Close() // it is made anew, as from now on its volume counts
	case s.Durable && isDamaged(err):
		err = nil // it is made anew
	}
	return err
}

// openDurableMap makes the disk durable, or no longer durable, where that is not what it was.
func (o *opening) openDurableMap(header mapHeader, m *blockMap, maps *mapStore, s *state, fresh bool) error {
	switch {
	case !o.durable() && maps.durable != nil:
		if err := maps.durable.Close(); err != nil {
			return err
		}
		maps.durable = nil
	case o.durable() && maps.durable == nil:
		if !fresh {
			if err := o.dir.syncContent(s.Map); err != nil {
				return err
			}
		}
		durable, err := createMap(o.dir.durableMap(), header, m, true)
		if err != nil {
			return err
		}
		maps.durable = durable
		maps.untaint()
	}
	if s.Durable == o.durable() {
		return nil
	}
	// A disk that stops being durable has to say so before anything is written without a flush, and the live map has to be
	// there by then, because nothing else is read any more.
	s.Durable = o.durable()
	return s.save(o.dir.state(), true)
}

// mergeMap opens a map file and reads it, see readMap; one that is not there is a *damagedError.
func mergeMap(path string, header mapHeader, m *blockMap, news func(page int64, stored bool)) (*os.File, error) {
	f, err := openMap(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, damagedMap("is missing")
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil {
		err = readMap(f, st.Size(), header, m, news)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// remake makes a new disk in place of one that cannot be kept, for that reason; empty where there was none.
func (o *opening) remake(ctx context.Context, reason string) (*state, error) {
	if reason != "" {
		o.log.Warn("the existing disk is not kept, it is made of the image again", zap.String("reason", reason), zap.String("disk", o.dir.disk()))
	}
	return o.create(ctx)
}

// create makes the state of a new disk, which comes before everything else: a file without one is taken for a complete disk.
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
	s := &state{Version: stateVersion, Image: o.name, Owner: o.owner(), Mode: o.opt.Mode, Size: max(o.img.Size(), o.opt.Size), ImageSize: o.img.Size(),
		Identity: o.identity(newIdentity()), Created: time.Now().UTC(), Durable: o.durable(), Map: newMapID(), Boot: bootID(), Chain: o.img.unhashed()}
	return s, o.spaceError(s.save(o.dir.state(), s.Durable))
}

// createFile makes the file of a new disk: a hole.
func (o *opening) createFile(s *state) error {
	out, err := createPartial(o.dir.disk(), 0o600)
	if err != nil {
		return err
	}
	err = o.resize(out.file, s.Size)
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
	// Someone may have enlarged the file; the new part reads as zeros. A sector that it has only a part of is made a whole one below.
	s.Size = max(s.Size, (st.Size()+SectorSize-1)/SectorSize*SectorSize)
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
	s.Mode, s.Owner, s.Identity = o.opt.Mode, o.owner(), o.identity(s.Identity)
	s.Boot = bootID()
	switch {
	case !s.Complete: // openDurableMap has more to do
	case !o.durable():
		s.Durable = false // whoever runs it without flushing makes it so
	case !s.Durable:
		if err := o.dir.syncContent(s.Map); err != nil {
			return false, err
		}
		s.Durable = true
	}
	same := s.Mode == before.Mode && s.Owner == before.Owner && s.Identity == before.Identity && s.Size == before.Size && s.Durable == before.Durable
	// The boot says nothing of a disk that is durable.
	if same && (s.Durable || s.Boot == before.Boot) && !s.stale {
		return false, nil
	}
	// A disk that stops being durable has to say so before anything is written without a flush.
	err = s.save(o.dir.state(), s.Durable || before.Durable)
	s.stale = err != nil
	if isNoSpace(err) && s.Durable == before.Durable && len(s.Chain) > 0 {
		// A volume that is not served stays full. What the file still says is true of the disk: the image is known again by its
		// hash, the size by the file, and what is set is set at the next start, too. A disk without a chain may have no state yet.
		o.log.Warn("no space is left to save the disk's settings: it is served with them, and they are saved later",
			zap.String("disk", o.dir.disk()), zap.Error(err))
		err = nil
	}
	return s.Size != was, o.spaceError(err)
}

// growFile makes the file larger, by a hole.
func (o *opening) growFile(size int64) error {
	f, err := os.OpenFile(o.dir.disk(), os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = o.resize(f, size)
	if err == nil && o.durable() {
		err = retry(f.Sync)
	}
	return errors.Join(err, f.Close())
}

// resize gives the disk's file its size. What a file system admits is less than the space it has: 16 TiB in ext4.
func (o *opening) resize(f *os.File, size int64) error {
	err := retry(func() error { return f.Truncate(size) })
	if errors.Is(err, unix.EFBIG) {
		return &SpaceError{Dir: o.dir.path, What: "the disk of " + printable(o.name), FileSize: size}
	}
	return err
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
	if !isDamaged(err) {
		return o.unread(err)
	}
	if !o.dir.persistent {
		return err // it is made again
	}
	return fmt.Errorf("%w: %w", o.refuse("is not complete, and "+err.Error(), "restore the volume from a backup, or remove "+PersistentName+"* in that directory to begin anew with the image"), err)
}
