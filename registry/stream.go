package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// StreamOptions say how to read the disks of an image without fetching it first. Cache and the
// directories are required.
type StreamOptions struct {
	// Cache keeps fetched data. The caller closes it after the disks.
	Cache *cache.Cache
	// CacheDir is the directory of the cache. Images without an index are kept in it, too.
	CacheDir string
	// KeepDir is a directory that lives as long as the disks that are made from the image. It has
	// which image the reference named when it was first used, and how to find its disks. It is made
	// if it is missing.
	KeepDir string
	// WhenComplete serves layers without chunk digests at once, and verifies them when all of them
	// was fetched (image.Unsure). Until then only TLS is trusted. Without WhenComplete they are
	// fetched and verified first.
	WhenComplete bool
	// UnpackMemory is how far back compressed data may refer: see unpack.Options. Bytes.
	UnpackMemory int64

	timeout time.Duration // of its farFiles
	glance  bool          // fetch no image as a whole, but fail with a *layer.Unsuited
}

// Stream is an image whose disks are read as they are needed. Any number of goroutines may call its
// methods, but Close must be the last call.
type Stream struct {
	client *Client
	opt    StreamOptions
	ref    transport.Reference
	kept   *keptSource

	// turn has one element. The goroutine that has taken it looks for the disks, which may take as
	// long as fetching the image, and sets the following fields. Once found is set, nobody changes
	// these any more, and all may read them.
	turn        chan struct{}
	comparing   chan struct{} // a turn for comparing the index with the layers
	verdict     *verdict
	found       atomic.Bool
	searchAgain bool // the disks in the record do not count: an earlier start trusted TLS
	image       *transport.Image
	index       *layer.Index  // nil: there is none
	fetched     *fetchedImage // nil: the image was not fetched as a whole
	parts       *parts        // nil: the image has an index, or was fetched as a whole

	// mu is never held while something is fetched.
	mu       sync.Mutex
	record   record                 // guarded by mu
	signedBy string                 // guarded by mu
	file     string                 // guarded by mu; digest of the file at an address
	unsure   map[string]*unverified // guarded by mu; layers that are open, by digest
	// booted is guarded by mu: for each disk, a channel that is closed when its boot order was
	// fetched
	booted map[string]<-chan struct{}
}

// Stream finds the disks of an image. A tag is resolved once: as long as KeepDir exists, it names
// the same image, and nothing in KeepDir is requested again.
//
// For an image that push has made, only the index is fetched before the disks are read. Every byte
// of a disk that is returned has a digest that the image's manifest vouches for. The same is true
// of layers with a table of contents (eStargz, zstd:chunked). Every other image is first fetched,
// verified, and unpacked into CacheDir, unless WhenComplete is set.
func (c *Client) Stream(ctx context.Context, ref transport.Reference,
	opt StreamOptions) (*Stream, error) {
	early, err := c.CheckServed(ref)
	if err != nil {
		return nil, err
	}
	opt.WhenComplete = opt.WhenComplete && early
	src, err := c.Source(ref, opt.CacheDir)
	if err != nil {
		return nil, err
	}
	s := &Stream{client: c, opt: opt, ref: ref,
		unsure: make(map[string]*unverified), booted: make(map[string]<-chan struct{}),
		turn: make(chan struct{}, 1), comparing: make(chan struct{}, 1)}
	s.turn <- struct{}{}
	s.comparing <- struct{}{}
	s.verdict = &verdict{keep: func(why error) error {
		return s.kept.write(wrongName(s.image.Digest), []byte(why.Error()))
	}}
	if s.kept, err = newKeptSource(src, opt.KeepDir); err != nil {
		return nil, errors.Join(err, src.Close())
	}
	s.record, err = s.kept.loadRecord(ref)
	if err == nil && ref.IsAddress() {
		s.file = s.kept.fileDigest(s.record.Digest)
	}
	if err == nil {
		err = s.kept.condemned(s.record.Digest)
	}
	// Disks that were served unverified do not count with this setting: the image may have to be
	// fetched as a whole, and then its disks have other names.
	s.searchAgain = s.record.Unverified && !opt.WhenComplete
	switch {
	case err != nil:
	case len(s.record.Disks) == 0 || s.searchAgain:
		err = s.find(ctx)
	case c.Gated():
		// Each start decides which images may run, even if their disks do not need them.
		err = s.resolve(ctx)
	}
	if err == nil { // the image may have been found wrong by another reference
		err = s.kept.condemned(s.record.Digest)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// find looks for the disks, unless they were found.
func (s *Stream) find(ctx context.Context) error {
	select {
	case <-s.turn:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { s.turn <- struct{}{} }()
	if s.found.Load() {
		return nil
	}
	err := s.search(ctx)
	s.found.Store(err == nil)
	return err
}

// search reads the manifest and finds the disks. Until it has ended, nobody else changes the
// record.
func (s *Stream) search(ctx context.Context) (err error) {
	if err := s.resolve(ctx); err != nil {
		return err
	}
	if s.index, err = s.readIndex(ctx); err != nil {
		return err
	}
	if s.index == nil {
		if err := s.findWithoutIndex(ctx); err != nil {
			return err
		}
	}
	if len(s.record.Disks) > 0 && !s.searchAgain {
		return nil
	}
	var names []string
	switch {
	case s.fetched != nil:
		names = s.fetched.names
	case s.parts != nil:
		names, err = s.partDisks(ctx)
	default:
		names, err = s.indexedDisks(ctx)
	}
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("%s has no disk: there is no file in its directory %s/", s.ref,
			layer.DiskDir)
	}
	// In the order in which a container of the image numbers them.
	slices.SortFunc(names, image.NaturalCompare)
	now := record{Reference: s.ref.String(), Digest: s.image.Digest, Named: s.image.Named,
		Pulled: s.fetched != nil, Unverified: s.parts != nil && len(s.parts.Walked) > 0}
	for _, name := range names {
		if !utf8.ValidString(name) { // the record would have another name, and so the next start
			return fmt.Errorf("%s has the disk %q, whose name is no UTF-8: rename it in the "+
				"image, or pull it", s.ref, name)
		}
		d := StreamDisk{Name: name}
		for _, old := range s.record.Disks {
			if old.Name == name {
				d = old
			}
		}
		now.Disks = append(now.Disks, d)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record = now
	return s.kept.saveRecord(now)
}

// findWithoutIndex finds out how to read the disks of an image without an index, and fetches
// the whole image if there is no other way.
func (s *Stream) findWithoutIndex(ctx context.Context) (err error) {
	why := "its fetched data does not exist any more"
	fetched := s.record.Pulled || (len(s.record.Disks) == 0 || s.searchAgain) && s.fetchedBefore()
	if !fetched {
		s.parts, err = s.findParts(ctx)
		if err == nil && len(s.record.Disks) == 0 {
			err = s.unpackable(ctx)
		}
		var no *layer.Unsuited
		if !errors.As(err, &no) {
			return err
		}
		s.parts, why = nil, no.Why
	}
	if s.opt.glance {
		return &layer.Unsuited{Why: why}
	}
	s.fetched, err = s.fetch(ctx, why)
	return err
}

// readIndex reads the index of the image. nil: there is none, or it does not describe all disks of
// the image.
func (s *Stream) readIndex(ctx context.Context) (*layer.Index, error) {
	x, err := layer.IndexBy(s.image, func(desc descriptor) (*layer.Index, error) {
		keep, err := osfile.NamelessIn(s.kept.dir)
		if err != nil {
			return nil, err
		}
		x, err := s.indexLayer(ctx, desc, keep)
		if err == nil {
			err = s.kept.saveBlob(desc, io.NewSectionReader(keep, 0, desc.Size))
		}
		if err != nil {
			return nil, errors.Join(err, keep.Close())
		}
		return x, nil
	})
	if err != nil || x == nil {
		return nil, err
	}
	if x.ChunkSize > cache.MaxChunkSize {
		return nil, x.Close()
	}
	if x.Tables, err = x.UnpackTables(func() (*os.File, error) {
		return osfile.NamelessIn(s.kept.dir)
	}); err != nil {
		return nil, errors.Join(fmt.Errorf("index of %s: %w", s.ref, err), x.Close())
	}
	return x, nil
}

// indexLayer reads the layer of the index through the cache. Daemons that share the cache fetch it
// once. Cached data is checked against the digest of the layer.
func (s *Stream) indexLayer(ctx context.Context, desc descriptor, keep *os.File) (x *layer.Index,
	err error) {
	read := func(in io.Reader) (err error) {
		x, err = layer.ParseIndex(in, s.image.Manifest.Layers, keep)
		return err
	}
	from, err := s.image.Source.Blob(desc)
	if err != nil {
		return nil, err
	}
	if desc.Size > 0 && desc.Size <= layer.MaxIndexLayer && from.Host() != "" {
		cached, err := s.opt.Cache.Blob(cache.BlobOptions{Digest: desc.Digest.String(),
			From: from.Host(), Size: desc.Size, ChunkSize: cache.MaxChunkSize,
			Fetch: from.Fill})
		if err != nil {
			return nil, err
		}
		layer := transport.NewBlob(desc, func(ctx context.Context, off, _ int64) io.ReadCloser {
			return io.NopCloser(&rangeReader{ctx: ctx, of: cached, off: off})
		})
		err = layer.Read(ctx, read)
		if err == nil || transport.GaveUp(err) {
			return x, err
		}
		if errors.As(err, new(*transport.DigestError)) { // the cache itself does not notice
			_ = cached.Remove()
		}
	}
	return x, s.image.Read(ctx, desc, layer.MaxIndexLayer, read)
}

// indexedDisks are the files of the index that are disks: those in the directory of the disks that
// are no backing files of others.
func (s *Stream) indexedDisks(ctx context.Context) (names []string, err error) {
	var top []string
	for _, f := range s.index.Files {
		if path.Dir(f.Name) == layer.DiskDir {
			top = append(top, path.Base(f.Name))
		}
	}
	return s.disksOf(ctx, top, func(name string) (image.Source, error) {
		return s.openFile(name)
	})
}

func (s *Stream) partDisks(ctx context.Context) ([]string, error) {
	var top []string
	for _, p := range s.parts.Files {
		for _, name := range p.Names() {
			if path.Dir(name) == layer.DiskDir {
				top = append(top, path.Base(name))
			}
		}
	}
	slices.Sort(top)
	return s.disksOf(ctx, top, func(name string) (image.Source, error) {
		return s.openPart(ctx, name)
	})
}

// disksOf returns those of the files that are disks.
func (s *Stream) disksOf(ctx context.Context, files []string,
	open func(name string) (image.Source, error)) ([]string, error) {
	disks, _, err := disksOf(ctx, s.image.Manifest.Layers, files, open)
	if err != nil {
		err = fmt.Errorf("%s: %w", s.ref, err)
	}
	return disks, err
}

// Digests returns the digest of what the reference named first and, if that is a list, the digest
// of this machine's image in it; otherwise platform is "". For an address, digest is the file's.
func (s *Stream) Digests() (digest, platform string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ref.IsAddress() {
		return s.file, ""
	}
	of := transport.Image{Digest: s.record.Digest, Named: cmp.Or(s.record.Named, s.record.Digest)}
	return of.Named, of.Platform()
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
	i := slices.IndexFunc(s.Disks(), func(d StreamDisk) bool { return d.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%s has no disk %q", s.ref, name)
	}
	if err := s.find(ctx); err != nil {
		return nil, err
	}
	var files []*streamedFile
	open := func(_ context.Context, name string) (image.Source, error) {
		file, err := s.openFile(name)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
		file.opening.Store(s.index.Tables != nil)
		return file, nil
	}
	opt.AtHand = s.index != nil && s.index.Tables != nil
	switch {
	case s.parts != nil:
		open = s.openPart
	case s.fetched != nil:
		open = s.fetched.openDisk
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
	booted := s.boot(files)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record.Disks = slices.Clone(s.record.Disks) // callers of Disks have the old slice
	s.record.Disks[i].Digests, s.booted[name] = digests, booted
	if err := s.kept.saveRecord(s.record); err != nil {
		return nil, errors.Join(err, img.Close())
	}
	return img, nil
}

// boot begins to fetch a guest's first reads of a disk, in the recorded order. The channel is
// closed when they were fetched; nil: no boot was recorded.
func (s *Stream) boot(files []*streamedFile) <-chan struct{} {
	var all []<-chan struct{}
	for _, f := range files {
		f.opening.Store(false)
		if len(f.entry.Boot) > 0 {
			all = append(all, f.order(f.entry.Boot, s.index.ChunkSize))
		}
	}
	if len(all) == 0 {
		return nil
	}
	done := make(chan struct{})
	go func() {
		for _, one := range all {
			<-one
		}
		close(done)
	}()
	return done
}

// Booted returns a channel that is closed when a guest's first reads of a disk were fetched, as far
// as possible. nil: no boot was recorded, or the disk is not open.
func (s *Stream) Booted(name string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.booted[name]
}

// openFile opens a file of the index by its name in the directory of the disks, and begins to fetch
// its metadata.
func (s *Stream) openFile(name string) (*streamedFile, error) {
	i := slices.IndexFunc(s.index.Files, func(f layer.IndexFile) bool {
		return f.Name == path.Join(layer.DiskDir, name)
	})
	if i < 0 {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	f, layers := &s.index.Files[i], s.image.Manifest.Layers
	from, err := s.image.Source.Blob(layers[slices.IndexFunc(layers, func(d descriptor) bool {
		return d.Digest.String() == f.Layer
	})])
	if err != nil {
		return nil, err
	}
	far, err := newFarFile(s.opt.Cache, from, s.index, f, s.farOptions(f.Name))
	if err != nil {
		return nil, err
	}
	for _, m := range f.Metadata {
		if s.index.Tables == nil {
			far.WillRead(m[0], m[1])
		}
	}
	return &streamedFile{far, s, f}, nil
}

// Close closes everything that Stream has opened.
func (s *Stream) Close() error {
	err := errors.Join(s.kept.Close(), s.index.Close())
	if s.fetched != nil {
		err = errors.Join(err, s.fetched.close())
	}
	for _, u := range s.unsure {
		err = errors.Join(err, u.notes.close())
	}
	return err
}
