package sources

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/adapt"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// keepName is the directory next to the disks for records about images in registries. The name of a
// disk's directory never begins with a dot.
const keepName = ".images"

// Sources finds the images of one daemon.
type Sources struct {
	opt     *options.Options
	client  *registry.Client // nil: not needed
	streams []*registry.Stream

	mu    sync.Mutex
	cache *cache.Cache // guarded by mu; nil: not open
	now   step         // guarded by mu
	// last are the last errors of references, registries and servers. Guarded by mu
	last map[string]lastError
}

// step is what Find is doing.
type step struct {
	what serving.Source // what it waits for; Name "": nothing
	at   time.Time      // when it began
}

// lastError is the last warning to a person.
type lastError struct {
	text string
	at   time.Time
}

// maxLast is for how many references the last error is kept.
const maxLast = 256

// Step is what Find waits for now, and since when. Its Name is "" if it waits for nothing.
func (s *Sources) Step() (what serving.Source, since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now.what, s.now.at
}

// begin notes what Find begins to wait for.
func (s *Sources) begin(what serving.Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = step{what, time.Now()}
}

// noteLast keeps the last error of a reference, a registry or a server.
func (s *Sources) noteLast(of string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil || len(s.last) >= maxLast {
		s.last = map[string]lastError{}
	}
	s.last[of] = lastError{err.Error(), time.Now()}
}

// Source describes, for people, where the content of a reference comes from.
func (s *Sources) Source(ref transport.Reference) serving.Source {
	what := "the registry of "
	if ref.IsAddress() {
		what = "the web server of "
	}
	return serving.Source{Kind: status.TroubleRegistry, Name: what + ref.String(),
		Why: func() (string, time.Time) {
			s.mu.Lock()
			defer s.mu.Unlock()
			last := s.last[ref.String()]
			if host := s.last[ref.Host()]; host.at.After(last.at) {
				last = host
			}
			return last.text, last.at
		}}
}

// New checks the settings for registries. It sends nothing to them yet.
func New(opt *options.Options) (s *Sources, err error) {
	s = &Sources{opt: opt}
	if s.hasReferences() || opt.Volumes != nil {
		with := opt.Streams.Registry
		with.Warn, with.Failed = s.warnOfRegistry(), s.noteLast
		if with.Gate, err = signature.NewGate(opt.Streams.Signatures); err != nil {
			return nil, err
		}
		if s.client, err = registry.New(with); err != nil {
			var wrong problems.List
			wrong.AddError(err)
			return nil, wrong.Err()
		}
	}
	return s, nil
}

// Find finds the images to serve from the start. Those of this machine and of containers are open,
// and the caller closes them. single says that a volume has the persistent directory.
func (s *Sources) Find(ctx context.Context, single bool) (found []plan.Disk, err error) {
	defer func() {
		if err != nil {
			plan.CloseImages(found)
		}
	}()
	if found, err = s.findLocal(single); err != nil {
		return found, err
	}
	if s.hasReferences() {
		if _, err := s.openCache(); err != nil { // its size limits the levels, too
			return found, err
		}
	}
	far, err := s.findStreams(ctx)
	if err != nil {
		return found, err
	}
	found = append(found, far...)
	containers, err := s.findContainers(ctx)
	found = append(found, containers...)
	if err != nil {
		return found, err
	}
	remotes, err := s.findRemotes(ctx)
	return append(found, remotes...), err
}

// registryWarnings is the shortest time between two warnings about registries: many reads may wait
// for the same one.
const registryWarnings = 5 * time.Second

// warnOfRegistry logs failed requests, but not each of them.
func (s *Sources) warnOfRegistry() func(text string) {
	seldom := serving.NewSeldom[struct{}](registryWarnings)
	return func(text string) {
		if n, ok := seldom.Admit(struct{}{}, time.Now()); ok {
			s.opt.Log.Warn("about fetching an image",
				append(serving.Unsaid(n), zap.String("what", text))...)
		}
	}
}

// findStreams finds the disks of the images in registries. It opens none yet.
func (s *Sources) findStreams(ctx context.Context) (found []plan.Disk, err error) {
	refused := problems.Refusal{Verb: "cannot be served"}
	defer s.begin(serving.Source{})
	for _, ref := range s.opt.Streams.References {
		s.begin(s.Source(ref))
		stream, err := s.Stream(ctx, ref, filepath.Join(s.opt.KeepDir(), keepName))
		if err != nil {
			refused.Add(err)
			continue
		}
		s.streams = append(s.streams, stream)
		what := "an image in a registry is served from there"
		if ref.IsAddress() {
			what = "a disk on a web server is served from there"
		}
		s.opt.Log.Info(what, zap.Stringer("reference", ref), digests(stream.Digests()),
			signedBy(stream.SignedBy()))
		disks := stream.Disks()
		for _, disk := range disks {
			f := plan.Disk{Name: ref.String(), Far: far(stream, disk), Source: s.Source(ref),
				SignedBy: stream.SignedBy(), From: stream.Reference(), Digests: stream.Digests}
			if len(disks) > 1 {
				f.Name += "/" + disk.Name
			}
			found = append(found, f)
		}
	}
	return found, refused.Err()
}

// digests are the log's fields for an image.
func digests(digest, platform string) zap.Field {
	return zap.Inline(zapcore.ObjectMarshalerFunc(func(to zapcore.ObjectEncoder) error {
		if digest != "" { // "": a file at an address that was not read yet
			to.AddString("digest", digest)
		}
		if platform != "" {
			to.AddString("platform_digest", platform)
		}
		return nil
	}))
}

// signedBy is the log's field for the key that has signed an image.
func signedBy(key string) zap.Field {
	if key == "" {
		return zap.Skip()
	}
	return zap.String("signed_by", key)
}

// far is a disk of an image in a registry, to be opened.
func far(stream *registry.Stream, of registry.StreamDisk) *plan.Far {
	return &plan.Far{Digests: of.Digests,
		Open: func(ctx context.Context, as image.Format) (*image.Image, <-chan struct{}, error) {
			opt := image.Options{}
			if as != "" {
				opt.Formats = map[string]image.Format{of.Name: as}
			}
			img, err := stream.Open(ctx, of.Name, opt)
			return img, stream.Booted(of.Name), err
		}}
}

// Stream finds an image in a registry. Records about it are kept in a directory. The caller closes
// the stream.
func (s *Sources) Stream(ctx context.Context, ref transport.Reference, keepDir string) (
	*registry.Stream, error) {
	opened, err := s.openCache()
	if err != nil {
		return nil, err
	}
	return s.client.Stream(ctx, ref, registry.StreamOptions{Cache: opened,
		CacheDir: s.opt.Streams.CacheDir, KeepDir: keepDir,
		WhenComplete: s.opt.Streams.WhenComplete, UnpackMemory: s.opt.UnpackMemory})
}

// openCache opens the cache of fetched data, unless it is open.
func (s *Sources) openCache() (_ *cache.Cache, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cache != nil {
		return s.cache, nil
	}
	opt := s.opt.Streams
	s.cache, err = cache.Open(opt.CacheDir, cache.Options{Size: opt.CacheSize, Log: s.opt.Log,
		Others: s.othersInCache})
	if err != nil {
		return nil, fmt.Errorf("%w; name another directory with %v", err,
			s.opt.Setting(&s.opt.Streams.CacheDir))
	}
	return s.cache, nil
}

// Fetched returns counts of fetched data, for the metrics. nil: there are none yet.
func (s *Sources) Fetched() *metrics.Fetched {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cache == nil {
		return nil
	}
	now := s.cache.Stats()
	return &metrics.Fetched{Bytes: now.FetchedBytes, Chunks: now.Fetched, Wrong: now.Wrong,
		Damaged: now.Damaged, Unsaved: now.Unsaved}
}

// othersInCache returns everything besides chunks that counts towards the size of the cache: images
// that were fetched as a whole, and levels of container images.
func (s *Sources) othersInCache() ([]cache.Other, error) {
	images, err := registry.Others(s.opt.Streams.CacheDir)()
	levels, err2 := adapt.Others(s.opt.Containers.Dir)()
	return append(images, levels...), errors.Join(err, err2)
}

// Close closes the images in registries and the cache. Call it after the disks are closed.
func (s *Sources) Close() (err error) {
	for _, one := range s.streams {
		err = errors.Join(err, one.Close())
	}
	s.streams = nil
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cache != nil {
		err = errors.Join(err, s.cache.Close())
		s.cache = nil
	}
	if s.client != nil {
		s.client.Close()
	}
	return err
}
