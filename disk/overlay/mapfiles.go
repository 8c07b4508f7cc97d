package overlay

import (
	"context"
	"errors"
	"io/fs"
	"os"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/internal/osfile"
)

// MapOptions say which disk map files belong to, and how they are kept.
type MapOptions struct {
	Live, Durable string      // paths of the two files
	ID            [16]byte    // of the disk's content
	ImageSize     int64       // bytes
	Boot          string      // of the kernel; "": unknown
	Volume        string      // that the files are on; "": unknown
	WasDurable    bool        // what a flush promised held so far: both files count
	IsDurable     bool        // it holds from now on
	Log           *zap.Logger // nil: none
}

// Map is the map of a disk with its two files. NewMap or LoadMap, then Begin, then New, which takes
// it over; a Map that is not given to New is closed by whoever has made it.
type Map struct {
	opt     MapOptions
	loaded  bool // of an existing disk
	blocks  *blockMap
	files   *mapStore
	stored  int64     // bytes that the image stores, in whole blocks
	header  mapHeader // of the durable file
	current mapHeader // of the live one
}

// NewMap is the map of a new disk: all of its content is in the image.
func NewMap(opt MapOptions) *Map {
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	m := &Map{opt: opt, blocks: newBlockMap(blocksOf(opt.ImageSize))}
	m.files = newMapStore(len(m.blocks.pages))
	m.header = mapHeader{granule: granuleFor(opt.ImageSize), blocks: m.blocks.blocks, id: opt.ID}
	m.current = m.header
	m.current.boot, m.current.volume = opt.Boot, opt.Volume
	return m
}

// LoadMap reads the map files of an existing disk. The live file counts only within one boot and
// one volume: it is not flushed, so that it may be ahead of the data after a crash of the machine,
// and in a snapshot of the volume. A file that cannot be relied on is a *DamagedError; other errors
// say nothing of it.
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
		// An earlier process may have been killed before it synced what it had written, or its sync
		// may have failed. That is read all the same, and the kernel takes it for clean after such
		// a failure: another sync would say that all is well, and only what is written again
		// reaches storage.
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
		return nil // nobody can tell which boot the live file is of
	}
	current := m.current
	if !m.opt.WasDurable {
		// without the live file there is no disk, and nobody takes snapshots of one that dies with
		// the pod
		current.volume = anyVolume
	}
	taint := func(page int64, _ bool) { m.files.taint(page) }
	live, err := mergeMap(m.opt.Live, current, m.blocks, taint)
	switch {
	case err == nil && (m.opt.WasDurable || !m.opt.IsDurable):
		m.files.live = live
	case err == nil:
		return live.Close() // it is made anew, as from now on its volume counts
	case m.opt.WasDurable && isDamaged(err):
		err = nil // it is made anew
	}
	return err
}

// Begin adds the image's holes to the map, and makes the files that are missing, so that all say
// the same. Where the disk is durable from now on and was not, what was written without a flush has
// reached storage before. ctx is for what the image has to be asked.
func (m *Map) Begin(ctx context.Context, img Image) (err error) {
	save := m.files.save
	if !m.loaded {
		save = nil // both files will be made of the map as it is then
	}
	if m.stored, err = markHoles(ctx, img, m.blocks, save); err != nil {
		return err
	}
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
		m.files.live = live // not before: a typed nil pointer would not be a nil interface
		return nil
	}
	if !osfile.IsFull(err) || m.files.durable == nil || !m.opt.IsDurable {
		return err
	}
	// A full volume has to be served, or the guest could not make room. What another machine has
	// left of its own map would count again when the disk comes back to it.
	if err := osfile.Remove(m.opt.Live); err != nil {
		return err
	}
	m.opt.Log.Warn("no space is left for the map of the disk: until the next start, "+
		"a daemon that is killed loses what was not flushed", zap.Error(err))
	return nil
}

// mergeMap opens a map file and reads it, see readMap; one that is not there is a *DamagedError.
func mergeMap(path string, header mapHeader, m *blockMap,
	news func(page int64, stored bool)) (*os.File, error) {
	f, err := openMap(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &DamagedError{"is missing"}
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
