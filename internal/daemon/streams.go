package daemon

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/adapt"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
)

// Streams are images in registries that are served without fetching them first.
type Streams struct {
	References []registry.Reference // in the order of their LUNs, without duplicates
	Registry   registry.Options     // Warn is the daemon's
	// for fetched chunks; daemons may share it; made if it is missing
	CacheDir  string
	CacheSize int64 // bytes; 0: no limit
	// WhenComplete serves layers without chunk digests before they are verified. They are verified
	// when they are complete, and a LUN fails if its content was wrong.
	WhenComplete bool
}

// keepName is the directory beside the disks for knowledge about images in registries. No disk's
// directory begins with a dot.
const keepName = ".images"

// streams are the open images in registries.
type streams struct {
	client *registry.Client // nil: there are none
	all    []*registry.Stream

	mu    sync.Mutex
	cache *cache.Cache // guarded by mu; nil: not open
}

// streamedDisk is a disk of an image in a registry.
type streamedDisk struct {
	stream *registry.Stream
	disk   registry.StreamDisk
}

// newStreams checks the settings for registries. It sends nothing to them yet.
func (d *Daemon) newStreams() error {
	opt := d.opt.Streams
	if err := d.checkContainers(); err != nil {
		return err
	}
	none := len(opt.References) == 0 && len(d.opt.Containers.References) == 0
	if none && d.opt.Volumes == nil {
		return nil
	}
	if opt.CacheDir == "" {
		return errors.New("daemon: there is no directory for what is fetched from registries")
	}
	opt.Registry.Warn = d.warnOfRegistry()
	var err error
	d.streams.client, err = registry.New(opt.Registry)
	return err
}

// registryWarnings is the shortest time between two warnings about registries: many reads may wait
// for the same one.
const registryWarnings = 5 * time.Second

// warnOfRegistry logs failed requests, but not each of them.
func (d *Daemon) warnOfRegistry() func(text string) {
	var mu sync.Mutex
	var last time.Time
	var left int
	return func(text string) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(last) < registryWarnings {
			left++
			return
		}
		fields := []zap.Field{zap.String("what", text)}
		if left > 0 {
			fields = append(fields, zap.Int("not_logged", left))
		}
		last, left = time.Now(), 0
		d.log.Warn("reads wait for a registry", fields...)
	}
}

// findStreams finds the disks of the images in registries. It opens none yet.
func (d *Daemon) findStreams(ctx context.Context) (found []foundImage, err error) {
	opt := d.opt.Streams
	if len(opt.References) == 0 {
		return nil, nil
	}
	if err := d.openCache(); err != nil {
		return nil, err
	}
	streamOpt := registry.StreamOptions{Cache: d.streams.cache, CacheDir: opt.CacheDir,
		KeepDir: filepath.Join(d.keepDir(), keepName), WhenComplete: opt.WhenComplete}
	var refused problems.Refusal
	refused.Verb = "cannot be served"
	for _, ref := range opt.References {
		s, err := d.streams.client.Stream(ctx, ref, streamOpt)
		if err != nil {
			refused.Add(err)
			continue
		}
		d.streams.all = append(d.streams.all, s)
		d.log.Info("an image in a registry is served from there", zap.Stringer("reference", ref),
			zap.String("digest", s.Digest()))
		disks := s.Disks()
		for _, disk := range disks {
			f := foundImage{name: ref.String(), streamed: &streamedDisk{s, disk}}
			if len(disks) > 1 {
				f.name += "/" + disk.Name
			}
			found = append(found, f)
		}
	}
	return found, refused.Err()
}

// keepDir is a directory that lives as long as the disks.
func (d *Daemon) keepDir() string {
	if d.opt.PersistentDir != "" {
		return d.opt.PersistentDir
	}
	return d.opt.WorkDir
}

// openCache opens the cache of fetched data, unless it is open.
func (d *Daemon) openCache() (err error) {
	d.streams.mu.Lock()
	defer d.streams.mu.Unlock()
	if d.streams.cache != nil {
		return nil
	}
	opt := d.opt.Streams
	d.streams.cache, err = cache.Open(opt.CacheDir, cache.Options{Size: opt.CacheSize, Log: d.log,
		Others: d.othersInCache})
	if err != nil {
		return fmt.Errorf("%w; name another directory with %v", err,
			d.names.of(SettingCacheDir))
	}
	stats := d.streams.cache.Stats
	d.metrics.SetFetched(func() metrics.Fetched {
		s := stats()
		return metrics.Fetched{Bytes: s.FetchedBytes, Chunks: s.Fetched, Wrong: s.Wrong,
			Damaged: s.Damaged, Unsaved: s.Unsaved}
	})
	return nil
}

// othersInCache returns everything besides chunks that counts towards the size of the cache: images
// that were fetched as a whole, and levels of container images.
func (d *Daemon) othersInCache() ([]cache.Other, error) {
	images, err := registry.Others(d.opt.Streams.CacheDir)()
	if err != nil {
		return nil, err
	}
	levels, err := adapt.Others(d.opt.Containers.Dir)()
	return append(images, levels...), err
}

// openStreamed opens the image of a disk, unless the disk is complete without it.
func (d *Daemon) openStreamed(ctx context.Context, f *foundImage, dir string) (err error) {
	settings := d.opt.Settings.of(f.name)
	if dir, err = d.homeOf(f.name, settings, dir); err != nil {
		return err
	}
	done := instance.Options{Name: f.name, WorkDir: d.workDir(settings)}
	if d.opt.PersistentDir != "" {
		done.PersistentDir = dir
	}
	if instance.IsComplete(done, f.streamed.disk.Digests) {
		d.log.Info("the disk of an image in a registry is complete, and is served without the "+
			"registry",
			zap.String("image", f.name))
		return nil
	}
	opt := image.Options{}
	if format, ok := d.opt.Settings.formats()[f.name]; ok {
		opt.Formats = map[string]image.Format{f.streamed.disk.Name: format}
	}
	f.image, err = f.streamed.stream.Open(ctx, f.streamed.disk.Name, opt)
	if err == nil && f.image.Unverified() {
		d.log.Warn("an image is served before its content is verified: only TLS protects it "+
			"until all of it is fetched", zap.String("image", f.name))
	}
	return err
}

// closeStreams closes the images in registries. Call it after the disks are closed.
func (d *Daemon) closeStreams() (err error) {
	for _, s := range d.streams.all {
		err = errors.Join(err, s.Close())
	}
	d.streams.all = nil
	d.streams.mu.Lock()
	defer d.streams.mu.Unlock()
	if d.streams.cache != nil {
		err = errors.Join(err, d.streams.cache.Close())
		d.streams.cache = nil
	}
	if d.streams.client != nil {
		d.streams.client.Close()
	}
	return err
}
