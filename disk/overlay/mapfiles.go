package overlay

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
)

// MapOptions say which disk map files belong to, and how to keep them.
type MapOptions struct {
	Live, Durable string      // paths of the two files
	ID            [16]byte    // of the disk's content
	ImageSize     int64       // bytes
	Boot          string      // of the kernel; "": unknown
	Volume        string      // of the volume that has the files; "": unknown
	WasDurable    bool        // so far a flush was durable: both files count
	IsDurable     bool        // from now on a flush is durable
	Log           *zap.Logger // nil: none
}

// Map is the map of a disk with its two files. Call NewMap or LoadMap, then Begin and New, or
// BeginLayer and NewLayer. The disk then owns the Map. Otherwise the caller closes it.
type Map struct {
	opt     MapOptions
	loaded  bool // the disk exists already
	blocks  *blockMap
	files   *mapStore
	stored  int64     // bytes that the image stores, in whole blocks
	header  mapHeader // of the durable file
	current mapHeader // of the live one
}

// NewMap returns the map of a new disk: all of its content is in the image.
func NewMap(opt MapOptions) *Map {
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	m := &Map{opt: opt, blocks: newBlockMap(blocksOf(opt.ImageSize))}
	m.files = newMapStore(len(m.blocks.pages))
	m.header = mapHeader{granule: granuleFor(opt.ImageSize), blocks: m.blocks.blocks, id: opt.ID}
	m.current = m.header
	m.current.boot, m.current.volume = opt.Boot, opt.Volume
	return m
}

// LoadMap reads the map files of an existing disk. The live file is used only within one boot and
// on one volume. It is not flushed, so after a crash of the machine, or in a snapshot of the
// volume, it may be ahead of the data. For a file that cannot be used, the error is a
// *DamagedError. After other errors, the file may be intact.
func LoadMap(opt MapOptions) (*Map, error) {
	m := NewMap(opt)
	m.loaded = true
	if err := m.load(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// Close closes the files.
func (m *Map) Close() error { return m.files.close() }

func (m *Map) load() error {
	if m.opt.WasDurable {
		// An earlier process may have been killed before it synced its writes, or its sync may have
		// failed. These pages can still be read here. After a failed sync the kernel takes them for
		// clean, and the next sync would report success. Only pages that are written again reach
		// storage.
		durable, err := mergeMap(m.opt.Durable, m.header, m.blocks, func(page int64, stored bool) {
			if stored {
				m.files.taint(page)
			}
		})
		if err != nil {
			return err
		}
		m.files.durable = durable
	}
	if m.opt.Boot == "" && m.opt.WasDurable {
		return nil // without the boot, it is unknown whether the live file is right
	}
	current := m.current
	if !m.opt.WasDurable {
		// without the live file there is no disk, and nobody takes snapshots of a disk that dies
		// with the pod
		current.volume = anyVolume
	}
	taint := func(page int64, _ bool) { m.files.taint(page) }
	live, err := mergeMap(m.opt.Live, current, m.blocks, taint)
	switch {
	case err == nil && (m.opt.WasDurable || !m.opt.IsDurable):
		m.files.live = live
	case err == nil:
		return live.Close() // it is made again, because its volume counts from now on
	case m.opt.WasDurable && isDamaged(err):
		err = nil // it is made again
	}
	return err
}

// Begin adds the image's holes to the map of a new disk, and makes the missing files, so that all
// agree. ctx limits the reads of the image.
func (m *Map) Begin(ctx context.Context, img Image) (err error) {
	if m.stored, err = markHoles(ctx, img, m.blocks, !m.loaded); err != nil {
		return err
	}
	return m.makeFiles()
}

// BeginLayer is Begin for a layer. It adds no holes, because those of the layers below may change.
func (m *Map) BeginLayer() error {
	m.stored = m.blocks.blocks * m.header.granule
	return m.makeFiles()
}

// makeFiles makes the missing files.
func (m *Map) makeFiles() error {
	if m.files.live == nil {
		if err := m.makeLive(); err != nil {
			return err
		}
	}
	switch {
	case !m.opt.IsDurable && m.files.durable != nil:
		if err := m.files.durable.Close(); err != nil {
			return err
		}
		m.files.durable = nil
	case m.opt.IsDurable && m.files.durable == nil:
		durable, err := createMap(m.opt.Durable, m.header, m.blocks, true)
		if err != nil {
			return err
		}
		m.files.durable = durable
		m.files.untaint()
	}
	return nil
}

// makeLive makes the live file.
func (m *Map) makeLive() error {
	live, err := createMap(m.opt.Live, m.current, m.blocks, false)
	if err == nil {
		m.files.live = live // only now: an interface with a nil pointer is not nil
		return nil
	}
	if !disk.IsNoSpace(err) || m.files.durable == nil || !m.opt.IsDurable {
		return err
	}
	// A full volume must be served, or the guest could not make room. Remove the map of another
	// machine or volume: it would be used again when the disk goes back there.
	if err := osfile.Remove(m.opt.Live); err != nil {
		return err
	}
	m.opt.Log.Warn("no space is left for the map of the disk: until the next start, "+
		"a daemon that is killed loses what was not flushed", zap.Error(err))
	return nil
}

// mergeMap opens a map file and reads it, see readMap. A missing file is a *DamagedError.
func mergeMap(path string, header mapHeader, m *blockMap,
	news func(page int64, stored bool)) (*os.File, error) {
	f, err := openMap(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &DamagedError{path, "is missing"}
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil {
		err = readMap(f, path, st.Size(), header, m, news)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
