package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/layer"
)

// A directory beside that of a fetched image has what is needed to read its disks by ranges, also
// after they were removed. It is kept longer than the disks, because it takes a thirtieth of their
// space at most.
//
//	pulled/sha256-DIGEST.seek/disks.json   digest of what follows, and a line feed; seekContents
//	pulled/sha256-DIGEST.seek/sha256-HEX   the checkpoints of a layer
const (
	seekSuffix = ".seek"
	seekName   = "disks.json"
	// maxSeekContents bounds seekName, in bytes.
	maxSeekContents = 16 << 20
)

// seekContents are the disks of an image, and where their files lie in the content of its layers.
type seekContents struct {
	Disks map[string]string `json:"disks"` // the name in the image, by the name of the raw file
	Files []*layer.Part     `json:"files"`
}

func (c *seekContents) find(name string) *layer.Part {
	i := slices.IndexFunc(c.Files, func(p *layer.Part) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return c.Files[i]
}

// seekMaker makes such a directory while an image is fetched.
type seekMaker struct {
	root     *osfile.Shared // of the cache
	dir      string         // in it
	contents seekContents
	offsets  map[string]int64 // of the files of the current layer
}

// newSeekMaker begins the directory. It returns nil if that fails; the image must then be fetched
// again after it was removed.
func newSeekMaker(root *osfile.Shared, dir string) *seekMaker {
	if root.RemoveAll(dir) != nil || root.Mkdir(dir) != nil {
		return nil
	}
	return &seekMaker{root: root, dir: dir, contents: seekContents{Disks: make(map[string]string)}}
}

// layer begins the notes of a layer; nil: there will be none.
func (m *seekMaker) layer(desc descriptor) *layer.Recorder {
	if m == nil {
		return nil
	}
	m.offsets = make(map[string]int64)
	f, err := m.root.OpenFile(path.Join(m.dir, keptName(desc.Digest.String())),
		os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return nil
	}
	m.root.Share(f)
	return layer.NewRecorder(f, desc.Size)
}

// file notes where the content of the current file begins.
func (m *seekMaker) file(rec *layer.Recorder, e *layer.Entry) {
	if rec == nil || !layer.Under(layer.DiskDir, e.Name) {
		return
	}
	if m.offsets[e.Name] = rec.Read; e.Sparse {
		delete(m.offsets, e.Name)
	}
}

// forget says that a file is not a disk as it lies in its layer.
func (m *seekMaker) forget(e *layer.Entry) {
	if m != nil {
		delete(m.offsets, e.Name)
	}
}

// layerDone completes the notes of a layer that was read and verified. shade has what the
// layers above hide of it.
func (m *seekMaker) layerDone(rec *layer.Recorder, desc descriptor, list *layer.List,
	shade *layer.Shadow) {
	if rec == nil || rec.Finish(desc.Size) != nil {
		return
	}
	for name, e := range list.Entries {
		if e.Kind == layer.EntryLink {
			e = list.Target(e)
		}
		if e == nil || e.Kind != layer.EntryFile || !shade.Shows(name) {
			continue
		}
		off, ok := m.offsets[e.Name]
		if !ok || e.Size > rec.Read-off {
			continue
		}
		m.contents.Files = append(m.contents.Files, &layer.Part{Name: name, Size: e.Size,
			Layer: desc.Digest.String(), Offset: off})
	}
}

// done completes the directory, or removes it if it lacks something that the disks need.
func (m *seekMaker) done(pulled []Pulled, files []*file) error {
	needed := make(map[string]bool) // layers
	for _, d := range pulled {
		m.contents.Disks[filepath.Base(d.To)] = d.Name
		for name := d.Name; name != ""; {
			p := m.contents.find(name)
			if p == nil || len(needed) > layer.MaxShown {
				return layer.ErrNoCheckpoints
			}
			needed[keptName(p.Layer)] = true
			i := slices.IndexFunc(files, func(f *file) bool { return f.name == name })
			if i < 0 {
				return layer.ErrNoCheckpoints
			}
			if files[i].backing == name {
				return layer.ErrNoCheckpoints
			}
			name = files[i].backing
		}
	}
	content, err := json.Marshal(m.contents)
	if err == nil {
		err = writeDigested(m.root, path.Join(m.dir, seekName), func(to *os.File, at int64) error {
			_, err := to.WriteAt(content, at)
			return err
		})
	}
	entries, readErr := fs.ReadDir(m.root.FS(), m.dir)
	err = errors.Join(err, readErr)
	for _, e := range entries {
		if e.Name() != seekName && !needed[e.Name()] {
			err = errors.Join(err, m.root.Remove(path.Join(m.dir, e.Name())))
		}
	}
	return err
}

// loadSeekContents reads the description of an image in a directory.
func loadSeekContents(content []byte) (*seekContents, error) {
	c := new(seekContents)
	if err := parseDigested(content, c); err != nil {
		return nil, err
	}
	for _, p := range c.Files {
		if p == nil || p.Size < 0 || p.Offset < 0 {
			return nil, errors.New("has an invalid file entry")
		}
	}
	if len(c.Disks) == 0 {
		return nil, errors.New("has no disks")
	}
	return c, nil
}

// openSeekDisks opens the disks of an image that was fetched before. It returns nil without an
// error if that is not possible, and the image must be fetched.
func (s *Stream) openSeekDisks(ctx context.Context, cacheRoot *os.Root, dir string) (_ *seekDisks,
	err error) {
	root, err := cacheRoot.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		s.warnOf("checkpoints")(fmt.Sprintf("%v; the image is fetched again", err))
		return nil, nil
	}
	defer root.Close()
	d := &seekDisks{layers: make(map[string]*seekable), disks: make(map[string]*seekDisk)}
	err = s.openSeek(ctx, root, d)
	switch {
	case err == nil:
		return d, nil
	case ctx.Err() != nil || errors.Is(err, disk.ErrNotNow):
		return nil, errors.Join(err, d.close())
	}
	s.warnOf("checkpoints")(fmt.Sprintf("%v; the image is fetched again", err))
	return nil, d.close()
}

func (s *Stream) openSeek(ctx context.Context, root *os.Root, d *seekDisks) error {
	file, err := root.OpenFile(seekName, os.O_RDONLY|osfile.OpenFlags, 0)
	if err != nil {
		return err
	}
	content, err := bounded.Read(file, maxSeekContents)
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	contents, err := loadSeekContents(content)
	if err != nil {
		return fmt.Errorf("%s %w", seekName, err)
	}
	open := func(_ context.Context, name string) (image.Source, error) {
		p := contents.find(path.Join(layer.DiskDir, name))
		if p == nil {
			return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
		}
		layer, err := s.seekableLayer(root, d, p.Layer)
		if err != nil {
			return nil, err
		}
		if p.Offset > layer.points.Size || p.Size > layer.points.Size-p.Offset {
			return nil, fmt.Errorf("%s does not lie in its layer", p.Name)
		}
		// Nobody sees this name: the disk has the name of the raw file.
		return &farFile{blob: seekablePart{layer, p.Offset, p.Size}, name: layer.name,
			chunk: layer.points.Chunk, warn: s.warnOf(p.Name)}, nil
	}
	for raw, name := range contents.Disks {
		img, err := image.OpenSource(ctx, path.Base(name), open, image.Options{})
		if err != nil {
			return err
		}
		d.disks[raw] = &seekDisk{image: img, name: rawDigest(s.image.Digest, raw)}
	}
	return nil
}

// seekableLayer opens a layer with its checkpoints, once.
func (s *Stream) seekableLayer(root *os.Root, d *seekDisks, digest string) (*seekable, error) {
	if l := d.layers[digest]; l != nil {
		return l, nil
	}
	layers := s.image.Manifest.Layers
	i := slices.IndexFunc(layers, func(l descriptor) bool { return l.Digest.String() == digest })
	if i < 0 {
		return nil, fmt.Errorf("the image has no layer %.100q", digest)
	}
	f, err := root.OpenFile(keptName(digest), os.O_RDONLY|osfile.OpenFlags, 0)
	if err != nil {
		return nil, err
	}
	d.files = append(d.files, f)
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	points, err := layer.OpenCheckpoints(f, info.Size(), layers[i].Size)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", keptName(digest), err)
	}
	layer, err := s.image.Source.Blob(layers[i])
	if err != nil {
		return nil, err
	}
	l, err := newSeekable(s.opt.Cache, layer, points)
	d.layers[digest] = l
	return l, err
}

func (d *seekDisks) names() (names []string) {
	for name := range d.disks {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// seekDisk is an image that is read like the raw file that was made from it.
type seekDisk struct {
	image *image.Image
	name  string // digest of the raw file's name
}

var _ image.Source = (*seekDisk)(nil)

func (d *seekDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return d.image.ReadAtContext(ctx, p, off)
}

func (d *seekDisk) Size() int64 { return d.image.Size() }

func (d *seekDisk) Identity() image.Identity { return image.Identity{Digest: d.name} }

func (d *seekDisk) Parallel() int { return d.image.Parallel() }

// Extent says that everything is data, because finding out would need a fetch.
func (d *seekDisk) Extent(off, length int64) (disk.Extent, error) {
	e, err := d.image.Extent(noWait, off, length)
	if errors.Is(err, disk.ErrNotNow) {
		return disk.Extent{Length: min(length, d.Size()-off), Data: true}, nil
	}
	return e, err
}

// noWait is a context that has ended. Calls with it never wait.
var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// WillRead does nothing. Data that is read in order is fetched ahead anyway.
func (d *seekDisk) WillRead(off, length int64) {}

func (d *seekDisk) Check() error { return nil }

// Close leaves the image open for its maker, because it may be used again.
func (d *seekDisk) Close() error { return nil }
