package instance

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/overlay"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// layerInfix is a part of the name of a layer's file: the name of the disk's file, layerInfix, the
// identifier of the layer.
const layerInfix = ".layer-"

func (d *diskDir) layers() string         { return d.disk() + image.LayersSuffix }
func (d *diskDir) layer(id string) string { return d.disk() + layerInfix + id }

// loadLayers returns the record of the layers above a disk, or nil if there is none. Its errors are
// those of loadState.
func (d *diskDir) loadLayers(s *state) (*overlay.Record, error) {
	r := new(overlay.Record)
	err := durable.LoadRecord(d.layers(), r)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = r.Check()
	}
	if err == nil && r.Content != s.Map {
		if !d.persistent && s.Version == stateVersion {
			// A version of this program without layers has made the disk again, and left the
			// layers.
			return nil, nil
		}
		err = durable.Damaged("it belongs to another disk")
	}
	if err != nil {
		return nil, fmt.Errorf("its record of snapshots %w", err)
	}
	return r, nil
}

// clearLayers removes the layers that are not in keep. If keep is nil, it removes the record, too.
func (d *diskDir) clearLayers(keep *overlay.Record) error {
	if err := osfile.Remove(d.layers() + durable.PartialSuffix); err != nil {
		return err
	}
	if keep == nil {
		return d.clearAllLayers()
	}
	return d.clearOtherLayers(keep)
}

// clearAllLayers removes the record last, because it says whose the layers are.
func (d *diskDir) clearAllLayers() error {
	if err := d.clearOtherLayers(new(overlay.Record)); err != nil {
		return err
	}
	return errors.Join(osfile.Remove(d.layers()), osfile.Remove(d.layers()+durable.SpareSuffix))
}

func (d *diskDir) clearOtherLayers(keep *overlay.Record) error {
	needed := map[string]bool{}
	for _, l := range keep.Layers {
		needed[l.ID] = true
		for _, suffix := range image.MapSuffixes {
			needed[l.ID+suffix] = true
		}
	}
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		id, is := strings.CutPrefix(e.Name(), d.diskFile+layerInfix)
		if is && !needed[id] {
			err = errors.Join(err, osfile.Remove(filepath.Join(d.path, e.Name())))
		}
	}
	return err
}

// judgeLayers says why the layers above a disk cannot be used, or puts their record into the state.
func (o *opening) judgeLayers(s *state) (v verdict, bad bool) {
	r, err := o.dir.loadLayers(s)
	switch {
	case durable.IsUnread(err):
		return verdict{what: refuse, err: o.unread(err)}, true
	case err != nil:
		return o.unfit(err.Error(), "cannot be used: "+err.Error(), restoreVolume), true
	case r == nil && s.Version == layeredVersion:
		reason := fmt.Sprintf("the record %q of its snapshots is missing", o.dir.layers())
		return o.unfit(reason, "cannot be used: "+reason, "put the record back, or "+
			restoreVolume), true
	case r == nil:
		return o.judgeUnrecorded()
	}
	for _, l := range r.Layers {
		path := o.dir.layer(l.ID)
		st, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) && (o.dir.persistent ||
			o.opt.Leftovers == LeftoversKeep):
			return verdict{what: refuse, err: fmt.Errorf("the disk %q has lost a part that its "+
				"snapshots have begun, %q; put it back, or %s", o.dir.disk(), path,
				restoreVolume)}, true
		case errors.Is(err, fs.ErrNotExist):
			return verdict{what: remake, reason: "a file of its snapshots is missing"}, true
		case err != nil:
			return verdict{what: refuse, err: err}, true
		case !st.Mode().IsRegular() || st.Size() < l.Floor:
			reason := fmt.Sprintf("the file %q of its snapshots has %d bytes and should have %d",
				path, st.Size(), l.Floor)
			return o.unfit(reason, "cannot be used: "+reason, restoreVolume), true
		}
	}
	s.layers = r
	return v, false
}

// judgeUnrecorded refuses a disk that has files of layers, if neither a state nor a record names
// them.
func (o *opening) judgeUnrecorded() (v verdict, bad bool) {
	if there, err := present(o.dir.layers()); err == nil && there {
		return v, false // the layers are of a disk that an earlier version has made again
	}
	names, err := osfile.Names(o.dir.path)
	if err != nil {
		return verdict{what: refuse, err: o.unread(err)}, true
	}
	at := slices.IndexFunc(names, func(name string) bool {
		return strings.HasPrefix(name, o.dir.diskFile+layerInfix)
	})
	if at < 0 {
		return v, false
	}
	reason := fmt.Sprintf("the record %q of its snapshots is missing, and there is %q",
		o.dir.layers(), names[at])
	return o.unfit(reason, "cannot be used: "+reason,
		"put the record back, or "+restoreVolume), true
}

// layersSize returns the size of the largest layer: the live one is never smaller than others.
func (o *opening) layersSize(s *state) (size int64, err error) {
	if s.layers == nil {
		return 0, nil
	}
	for _, l := range s.layers.Layers {
		st, err := os.Lstat(o.dir.layer(l.ID))
		if err != nil {
			return 0, err
		}
		size = max(size, st.Size())
	}
	return size, nil
}

// assembleLayers puts the layers of earlier starts above the bottom of a disk. The bottom stays
// open after an error.
func (o *opening) assembleLayers(bottom *overlay.Disk, s *state) (*overlay.Tree, error) {
	if err := o.dir.clearLayers(s.layers); err != nil {
		o.log.Warn("files of layers that nobody needs could not be removed", zap.Error(err))
	}
	volume, err := volumeID(o.dir.path)
	if err != nil {
		return nil, o.unread(err)
	}
	opt := overlay.TreeOptions{Name: o.name, Record: s.layers, Marked: o.dir.layered,
		Content: s.Map, Durable: o.durable(), Slots: o.opt.Workers.copying, Log: o.log,
		Layer: overlay.Options{ReadOnly: o.opt.ReadOnly}}
	files := &shelf{dir: o.dir, durable: o.durable(), wasDurable: o.durable(), volume: volume,
		log: o.log}
	opt.Shelf = files
	if !s.Complete {
		opt.Layer.Reads = o.opt.Reads
	}
	if s.layers != nil {
		files.wasDurable = s.layers.Durable
		if top := s.layers.Top; top != "" {
			if err := o.growFile(o.dir.layer(top), s.Size); err != nil {
				return nil, o.spaceError(err)
			}
		}
	}
	tree, err := overlay.OpenTree(bottom, opt)
	if err != nil {
		return nil, o.spaceError(o.damaged(err))
	}
	return tree, nil
}

// shelf keeps the files of a disk's layers. See overlay.Shelf.
type shelf struct {
	dir        *diskDir
	durable    bool // a flush reaches storage
	wasDurable bool // a flush reached storage in the earlier starts that made the layers
	volume     string
	log        *zap.Logger
}

func (s *shelf) options(id string, floor int64) (opt overlay.MapOptions, err error) {
	mapID, err := hex.DecodeString(id)
	if err != nil {
		return opt, err
	}
	path := s.dir.layer(id)
	return overlay.MapOptions{Live: path + image.MapSuffixes[0],
		Durable: path + image.MapSuffixes[1], ID: [16]byte(mapID), ImageSize: floor,
		Boot: bootID(), Volume: s.volume,
		WasDurable: s.wasDurable, IsDurable: s.durable, Log: s.log}, nil
}

// Make implements Shelf. The maps are made first, as for a new disk.
func (s *shelf) Make(id string, size, floor int64) (overlay.File, *overlay.Map, error) {
	opt, err := s.options(id, floor)
	if err == nil {
		err = s.dir.checkPath()
	}
	if err != nil {
		return nil, nil, err
	}
	m := overlay.NewMap(opt)
	err = m.BeginLayer()
	if err == nil {
		err = makeFile(s.dir.layer(id), size, s.durable)
	}
	var file *rawfile.File
	if err == nil {
		file, err = s.open(id)
	}
	if err != nil {
		return nil, nil, errors.Join(err, m.Close(), s.Remove(id))
	}
	return file, m, nil
}

func (s *shelf) Open(id string, floor int64) (overlay.File, *overlay.Map, error) {
	opt, err := s.options(id, floor)
	if err != nil {
		return nil, nil, err
	}
	if s.durable && !s.wasDurable {
		if err := syncFile(s.dir.layer(id)); err != nil {
			return nil, nil, err
		}
	}
	m, err := overlay.LoadMap(opt)
	if err != nil {
		return nil, nil, err
	}
	var file *rawfile.File
	if err = m.BeginLayer(); err == nil {
		file, err = s.open(id)
	}
	if err != nil {
		return nil, nil, errors.Join(err, m.Close())
	}
	return file, m, nil
}

// open opens the file of a layer. A guest writes to it, so it is never taken for an image.
func (s *shelf) open(id string) (*rawfile.File, error) {
	file, err := rawfile.Open(s.dir.layer(id), rawfile.Options{Durable: s.durable, Private: true,
		Killed: s.dir.killed})
	if err == nil {
		_ = image.MarkRaw(file.File, "") // as for the bottom, nothing depends on it
	}
	return file, err
}

func (s *shelf) Remove(id string) error {
	path := s.dir.layer(id)
	err := osfile.Remove(path)
	for _, suffix := range image.MapSuffixes {
		err = errors.Join(err, osfile.Remove(path+suffix))
	}
	return err
}

func (s *shelf) Save(r *overlay.Record) error {
	if err := s.dir.checkPath(); err != nil {
		return err
	}
	if r == nil {
		return s.dir.clearAllLayers()
	}
	return durable.SaveRecord(s.dir.layers(), r, s.dir.checkPath, syncIf(s.synced()))
}

func (s *shelf) Mark(layers bool) error { return s.dir.mark(layers, s.synced()) }

func (s *shelf) synced() bool { return s.durable || s.wasDurable }

// volumeID identifies a mounted volume for as long as the kernel is up: by its device number and,
// because numbers are reused, by the sequence number of a block device. A copy of a volume, such as
// a snapshot, has another identifier, and so has a volume that was gone for a while. The result is
// "" if no identifier would last: the file system of a container gets a new number at every start.
// It is also "" where nobody may ask. After an error the identifier is unknown for now. A half of
// it would look like another volume, and the live map would not be used.
func volumeID(path string) (string, error) {
	var st unix.Stat_t
	var fs unix.Statfs_t
	err := osfile.Retry(func() error { return unix.Stat(path, &st) })
	if err == nil {
		err = osfile.Retry(func() error { return unix.Statfs(path, &fs) })
	}
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, os.ErrPermission) || err == nil &&
		fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return "", nil
	}
	if err != nil {
		return "", &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	number := fmt.Sprintf("%d:%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev)))
	// The link leads to the device, or to a partition in the directory of its device. Cleaning the
	// path would change its meaning.
	for _, name := range []string{"/diskseq", "/../diskseq"} {
		text, err := os.ReadFile("/sys/dev/block/" + number + name)
		if err == nil {
			return number + "#" + strings.TrimSpace(string(text)), nil
		}
		if isScarce(err) {
			return "", err
		}
	}
	return number, nil
}
