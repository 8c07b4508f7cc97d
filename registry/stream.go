package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/registry/cache"
)

// StreamOptions say how to read the disks of an image without fetching it first. Cache and the
// directories are required.
type StreamOptions struct {
	// Cache keeps fetched data. It belongs to the caller, who closes it after the disks.
	Cache *cache.Cache
	// CacheDir is the directory of the cache. Images without an index are kept in it, too.
	CacheDir string
	// KeepDir is a directory that lives as long as the disks that are made from the image. It keeps
	// which image the reference named when it was first used, and how to find its disks. It is made
	// if it is missing.
	KeepDir string
	// WhenComplete serves layers without chunk digests at once, and verifies them when all of them
	// was fetched (image.Unsure). Until then only TLS is trusted. Without it they are fetched and
	// verified first.
	WhenComplete bool
}

// Stream is an image whose disks are read as they are needed. Any number of goroutines may call its
// methods, but Close must be the last call.
type Stream struct {
	client *Client
	opt    StreamOptions
	ref    Reference
	kept   *keptSource
	pause  time.Duration // between two tries of wholeFile.Verify

	mu     sync.Mutex
	record record      // guarded by mu
	anew   bool        // guarded by mu; search for the disks although the record has some
	image  *resolved   // guarded by mu; nil: its manifest was not needed yet
	index  *index      // guarded by mu; nil: it has none
	tables *os.File    // guarded by mu; those of the index; nil: it has none
	pulled *pulledDisk // guarded by mu; nil: it was not fetched as a whole
	parts  *parts      // guarded by mu; nil: it has an index, or was fetched as a whole

	unsure    map[string]*unverified // guarded by mu; layers that are open, by digest
	small     map[string][]byte      // guarded by mu; layers that were fetched to search for parts
	smallSize int                    // bytes of small layers so far; guarded as small

	// booted is guarded by mu: for each disk, a channel that is closed when its boot order was
	// fetched
	booted map[string]<-chan struct{}
}

// Stream finds the disks of an image. A tag is resolved once: as long as KeepDir exists, it names
// the same image, and nothing in KeepDir is requested again.
//
// Of an image that push has made, only the index is fetched before the disks are read. Every byte
// of a disk that is returned has a digest that the image's manifest vouches for. The same is true
// of layers with a table of contents (eStargz, zstd:chunked). Every other image is first fetched,
// verified, and unpacked into CacheDir, unless WhenComplete is set.
func (c *Client) Stream(ctx context.Context, ref Reference, opt StreamOptions) (*Stream, error) {
	src, err := c.source(ref)
	if err != nil {
		return nil, err
	}
	if r, ok := src.(*repository); ok {
		r.spoolDir = opt.CacheDir
	}
	s := &Stream{client: c, opt: opt, ref: ref, pause: longPause,
		unsure: make(map[string]*unverified)}
	if s.kept, err = keep(src, opt.KeepDir); err != nil {
		return nil, errors.Join(err, src.Close())
	}
	s.record, err = s.kept.loadRecord(ref)
	// It may have to be fetched now. Then its disks have other names.
	s.anew = s.record.Unverified && !opt.WhenComplete
	if err == nil && (len(s.record.Disks) == 0 || s.anew) {
		s.mu.Lock()
		err = s.findLocked(ctx)
		s.mu.Unlock()
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// findLocked reads the manifest and finds the disks. It takes the manifest of the first start if
// there was one.
func (s *Stream) findLocked(ctx context.Context) (err error) {
	s.kept.pinned = s.record.Digest
	if s.image, err = resolveIn(ctx, s.kept, s.ref); err != nil {
		return err
	}
	if s.index, err = s.readIndex(ctx); err != nil {
		return err
	}
	if s.index == nil {
		if err := s.findWithoutIndexLocked(ctx); err != nil {
			return err
		}
	}
	if len(s.record.Disks) > 0 && !s.anew {
		return nil
	}
	var names []string
	switch {
	case s.pulled != nil:
		names = s.pulled.names
	case s.parts != nil:
		names, err = s.partDisks(ctx)
	default:
		names, err = s.indexedDisks(ctx)
	}
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("%s has no disk: there is no file in its directory %s/", s.ref, diskDir)
	}
	// As a container of the image numbers them.
	slices.SortFunc(names, image.NaturalCompare)
	before := s.record.Disks
	s.record = record{Reference: s.ref.String(), Digest: s.image.digest, Pulled: s.pulled != nil,
		Unverified: s.parts != nil && len(s.parts.Walked) > 0}
	for _, name := range names {
		d := StreamDisk{Name: name}
		for _, old := range before {
			if old.Name == name {
				d = old
			}
		}
		s.record.Disks = append(s.record.Disks, d)
	}
	return s.kept.saveRecord(s.record)
}

// findWithoutIndexLocked finds out how to read the disks of an image without an index, and fetches
// the whole image if there is no other way.
func (s *Stream) findWithoutIndexLocked(ctx context.Context) (err error) {
	s.small, s.smallSize = make(map[string][]byte), 0
	defer func() { s.small = nil }()
	why := "its fetched data does not exist any more"
	fetched := s.record.Pulled || (len(s.record.Disks) == 0 || s.anew) && s.fetchedBefore()
	if !fetched {
		s.parts, err = s.findParts(ctx)
		var no *unsuited
		if !errors.As(err, &no) {
			return err
		}
		s.parts, why = nil, no.why
	}
	s.pulled, err = s.pull(ctx, why)
	return err
}

// readIndex reads the index of the image. nil: there is none, or one that does not describe all
// disks of the image.
func (s *Stream) readIndex(ctx context.Context) (*index, error) {
	x, err := s.image.indexBy(func(desc descriptor) ([]byte, error) {
		s.warm(ctx, desc)
		text, err := s.indexLayer(ctx, desc)
		if err == nil {
			err = s.kept.saveBlob(desc.Digest, text)
		}
		return text, err
	})
	if err != nil || x == nil || x.ChunkSize > cache.MaxChunkSize {
		return nil, err
	}
	if err := s.unpackLocked(x); err != nil {
		return nil, fmt.Errorf("index of %s: %w", s.ref, err)
	}
	return x, nil
}

// indexLayer reads the layer of the index through the cache. Daemons that share the cache fetch it
// once. Cached data is checked against the digest of the layer.
func (s *Stream) indexLayer(ctx context.Context, desc descriptor) ([]byte, error) {
	if desc.Size > 0 && desc.Size <= maxIndexLayer && !s.kept.has(desc.Digest) {
		layer, err := s.image.source.blob(desc)
		if err != nil {
			return nil, err
		}
		cached, err := s.opt.Cache.Blob(cache.BlobOptions{Digest: desc.Digest.String(),
			Size: desc.Size, ChunkSize: cache.MaxChunkSize, Fetch: layer.fill})
		if err != nil {
			return nil, err
		}
		text := make([]byte, desc.Size)
		n, err := cached.ReadAt(ctx, text, 0)
		if err == nil && digestOf(text[:n]) == desc.Digest.String() {
			return text, nil
		}
	}
	return s.image.small(ctx, desc, maxIndexLayer)
}

// unpackLocked takes the tables out of an index.
func (s *Stream) unpackLocked(x *index) (err error) {
	if s.tables, err = x.unpackTables(s.kept.dir); s.tables != nil {
		x.tables, x.packed = s.tables, nil
	}
	return err
}

// warmed is how many connections are made while the index is fetched.
const warmed = 3

// warm makes connections that are needed soon. The head of a disk, its tail and its tables are
// fetched at once, and each would first wait for a connection. Errors are left to those who need
// the connections.
func (s *Stream) warm(ctx context.Context, desc descriptor) {
	r, ok := s.kept.source.(*repository)
	if !ok || s.kept.has(desc.Digest) {
		return
	}
	for range warmed {
		go func() {
			e := r.order()[0]
			res, err := e.once(ctx, pullScopes(e), request{
				method: http.MethodHead, path: "blobs/" + desc.Digest.String(),
				accept: []int{http.StatusOK}})
			if err == nil {
				_ = res.Body.Close()
			}
		}()
	}
}

// indexedDisks are the files of the index that are disks: those in the directory of the disks that
// are no backing files of others.
func (s *Stream) indexedDisks(ctx context.Context) (names []string, err error) {
	var top []string
	files := make(map[string]*indexFile)
	for i := range s.index.Files {
		if f := &s.index.Files[i]; path.Dir(f.Name) == diskDir {
			name := path.Base(f.Name)
			top, files[name] = append(top, name), f
		}
	}
	return s.notBelow(ctx, top, func(name string) (image.Source, error) {
		return s.openIndexed(files[name])
	})
}

// partDisks are the disks of the parts.
func (s *Stream) partDisks(ctx context.Context) ([]string, error) {
	var top []string
	for _, p := range s.parts.Files {
		if path.Dir(p.Name) == diskDir {
			top = append(top, path.Base(p.Name))
		}
	}
	slices.Sort(top)
	var one sync.Mutex
	return s.notBelow(ctx, top, func(name string) (image.Source, error) {
		one.Lock()
		defer one.Unlock()
		return s.openPart(ctx, name)
	})
}

// notBelow are the files that are no backing file of another one, and that are meant to be disks.
func (s *Stream) notBelow(ctx context.Context, all []string,
	open func(name string) (image.Source, error)) (names []string, err error) {
	if len(all) == 1 {
		return all, nil // everything that it needs is elsewhere
	}
	below, passed := make([]string, len(all)), make([]bool, len(all))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(farReads)
	for i, name := range all {
		group.Go(func() error {
			file, err := open(name)
			if err != nil {
				return err
			}
			head := make([]byte, min(file.Size(), qcow2.HeadSize))
			if len(head) > 0 {
				if _, err := file.ReadAt(ctx, head, 0); err != nil && err != io.EOF {
					return errors.Join(fmt.Errorf("%s of %s: %w", name, s.ref, err),
						file.Close())
				}
			}
			passed[i] = image.PassOver(name, file.Size(), qcow2.IsQcow2(head))
			below[i] = image.BackingOf(name, head, file.Size())
			return file.Close()
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for i, name := range all {
		if !passed[i] && !slices.Contains(below, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// Digest is the digest of the image's manifest.
func (s *Stream) Digest() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.record.Digest
}

// Disks returns the disks of the image.
func (s *Stream) Disks() []StreamDisk {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.record.Disks)
}

// Open opens a disk of the image with its backing files, and validates it. The caller closes the
// image before the stream.
func (s *Stream) Open(ctx context.Context, name string, opt image.Options) (*image.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.record.Disks, func(d StreamDisk) bool { return d.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%s has no disk %q", s.ref, name)
	}
	if s.index == nil && s.pulled == nil && s.parts == nil {
		if err := s.findLocked(ctx); err != nil {
			return nil, err
		}
	}
	var files []orderedFile
	open := func(_ context.Context, name string) (image.Source, error) {
		file, err := s.openFile(name)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
		file.opening.Store(s.tables != nil)
		return file.source, nil
	}
	opt.AtHand = s.tables != nil
	switch {
	case s.parts != nil:
		open = s.openPart
	case s.pulled != nil:
		open = s.pulled.open
		opt.Formats = map[string]image.Format{name: image.FormatRaw}
	}
	img, err := image.OpenSource(ctx, name, open, opt)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.ref, err)
	}
	var digests []string
	for _, f := range img.Unhashed() {
		digests = append(digests, f.Digest)
	}
	s.record.Disks[i].Digests = digests
	if err := s.kept.saveRecord(s.record); err != nil {
		return nil, errors.Join(err, img.Close())
	}
	s.bootLocked(name, files)
	return img, nil
}

// orderedFile is a file with the chunks that a guest reads first.
type orderedFile struct {
	*farFile
	source image.Source // the same, for the image
	boot   [][2]int64
}

// bootLocked begins to fetch a guest's first reads of a disk, in the recorded order.
func (s *Stream) bootLocked(name string, files []orderedFile) {
	var all []<-chan struct{}
	for _, f := range files {
		f.opening.Store(false)
		if len(f.boot) > 0 {
			all = append(all, f.order(f.boot, s.index.ChunkSize))
		}
	}
	if len(all) == 0 {
		return
	}
	done := make(chan struct{})
	go func() {
		for _, one := range all {
			<-one
		}
		close(done)
	}()
	if s.booted == nil {
		s.booted = make(map[string]<-chan struct{})
	}
	s.booted[name] = done
}

// Booted is closed when a guest's first reads of a disk were fetched, as far as possible. nil: no
// boot was recorded, or the disk is not open.
func (s *Stream) Booted(name string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.booted[name]
}

// openFile opens a file by its name in the directory of the disks, and begins to fetch its
// metadata.
func (s *Stream) openFile(name string) (orderedFile, error) {
	for i := range s.index.Files {
		f := &s.index.Files[i]
		if f.Name != path.Join(diskDir, name) {
			continue
		}
		file, err := s.openIndexed(f)
		if err != nil {
			return orderedFile{}, err
		}
		for _, m := range f.Metadata {
			if s.tables == nil {
				file.WillRead(m[0], m[1])
			}
		}
		whole, err := s.wholeFile(f, file)
		return orderedFile{file, whole, f.Boot}, err
	}
	return orderedFile{}, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

// Close closes everything that Stream has opened.
func (s *Stream) Close() error {
	err := s.kept.Close()
	if s.tables != nil {
		err = errors.Join(err, s.tables.Close())
	}
	if s.pulled != nil {
		err = errors.Join(err, s.pulled.close())
	}
	for _, u := range s.unsure {
		err = errors.Join(err, u.notes.close())
	}
	return err
}

// openIndexed opens a file of the index.
func (s *Stream) openIndexed(f *indexFile) (*farFile, error) {
	i := slices.IndexFunc(s.image.manifest.Layers, func(d descriptor) bool {
		return d.Digest.String() == f.Layer
	})
	layer, err := s.image.source.blob(s.image.manifest.Layers[i])
	if err != nil {
		return nil, err
	}
	return newFarFile(s.opt.Cache, layer, s.index, f, s.warnOf(f.Name))
}
