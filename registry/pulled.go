package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/registry/cache"
)

// pulledDir is the directory inside that of the cache for the disks of images without an index:
//
//	pulled/sha256-DIGEST/NAME   a disk as a raw file, of the image with that manifest
//	pulled/sha256-DIGEST.seek/  what it takes to read it by ranges when it was removed: seekMaker
//	pulled/sha256-DIGEST.lock   locked by whoever fetches or removes it (alone), or serves it
//	                            (shared)
//
// The lock stays when the disks are removed. The time of the directory says when it was last used.
const pulledDir = "pulled"

// pulledDisk is an image without an index whose disks were fetched as raw files.
type pulledDisk struct {
	dir   string
	lock  *os.File
	names []string
	seek  *seekDisks // nil: the raw files are there
}

// lockPoll is how often to look whether another process has fetched the image.
const lockPoll = 100 * time.Millisecond

// pull fetches and verifies the disks of the image, unless a process has done so before. why goes
// to a person, because this takes long.
func (s *Stream) pull(ctx context.Context, why string) (*pulledDisk, error) {
	for {
		d, err := s.pullOnce(ctx, why)
		if !errors.Is(err, errGone) {
			return d, err
		}
	}
}

// fetchedBefore reports whether somebody has fetched the image. Then there is no need to look into
// it.
func (s *Stream) fetchedBefore() bool {
	dir := filepath.Join(s.opt.CacheDir, pulledDir, keptName(s.image.digest))
	for _, there := range []string{dir, dir + seekSuffix} {
		if _, err := os.Stat(there); err == nil {
			return true
		}
	}
	return false
}

// errGone is an image that was removed before it could be locked.
var errGone = errors.New("the fetched image was removed")

func (s *Stream) pullOnce(ctx context.Context, why string) (_ *pulledDisk, err error) {
	base := filepath.Join(s.opt.CacheDir, pulledDir)
	if err := os.MkdirAll(base, 0o770); err != nil {
		return nil, err
	}
	d := &pulledDisk{dir: filepath.Join(base, keptName(s.image.digest))}
	d.lock, err = os.OpenFile(d.dir+".lock", os.O_RDWR|os.O_CREATE, 0o660)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	for !d.there() {
		err := flock.Lock(d.lock, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			if d.there() {
				break
			}
			if d.seek, err = s.seekLocked(ctx, d.dir+seekSuffix); err != nil {
				return nil, err
			}
			if d.seek != nil {
				break
			}
			if err := s.pullInto(ctx, d.dir, why); err != nil {
				return nil, err
			}
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(lockPoll):
		}
	}
	if err := flock.Lock(d.lock, unix.LOCK_SH); err != nil {
		return nil, err
	}
	if d.seek != nil {
		d.names = d.seek.names()
		d.touch()
		return d, nil
	}
	entries, err := os.ReadDir(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errGone
	}
	d.names = namesOf(entries)
	d.touch()
	return d, err
}

// touch records that the image is used. If that fails, the image may be removed too early.
func (d *pulledDisk) touch() {
	for _, dir := range []string{d.dir, d.dir + seekSuffix} { // what is removed first comes first
		now := time.Now()
		_ = os.Chtimes(dir, now, now)
	}
}

// Others are the images that were fetched as a whole into the directory of a cache. They are for
// cache.Options.
func Others(cacheDir string) func() ([]cache.Other, error) {
	base := filepath.Join(cacheDir, pulledDir)
	return func() (all []cache.Other, err error) {
		entries, err := os.ReadDir(base)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		for _, e := range entries {
			if name, ok := strings.CutSuffix(e.Name(), ".lock"); ok && err == nil {
				dir := filepath.Join(base, name)
				for _, what := range [][]string{{dir, dir + partialSuffix},
					{dir + seekSuffix, dir + seekSuffix + partialSuffix}} {
					var o cache.Other
					var otherErr error
					if o, otherErr = otherOf(dir, what); o.Bytes > 0 {
						all = append(all, o)
					}
					err = errors.Join(err, otherErr)
				}
			}
		}
		return all, err
	}
}

// otherOf returns the files of a fetched image, including the remains of fetching it.
func otherOf(dir string, what []string) (cache.Other, error) {
	o := cache.Other{Name: what[0], Remove: func() error { return removePulled(dir, what) }}
	for _, path := range what {
		err := filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			if st, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() {
				o.Bytes += st.Blocks * 512
			}
			if d.IsDir() && info.ModTime().After(o.Used) {
				o.Used = info.ModTime()
			}
			return nil
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return cache.Other{}, err
		}
	}
	return o, nil
}

// removePulled removes the disks of a fetched image, unless somebody fetches or serves it.
func removePulled(dir string, what []string) error {
	lock, err := os.OpenFile(dir+".lock", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer lock.Close()
	err = flock.Lock(lock, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return cache.ErrInUse
	}
	if err != nil {
		return err
	}
	for _, path := range what {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

// partialSuffix ends the names of unfinished files.
const partialSuffix = ".partial"

func (d *pulledDisk) there() bool {
	_, err := os.Stat(d.dir)
	return err == nil
}

// pullInto makes the directory with the disks. The directory appears when it is complete.
func (s *Stream) pullInto(ctx context.Context, dir, why string) error {
	s.client.opt.Warn(fmt.Sprintf("%s is fetched and verified before it is served, as it has no "+
		"index of its disks: %s", s.ref, why))
	partial := dir + partialSuffix
	if err := os.RemoveAll(partial); err != nil {
		return err
	}
	if err := os.Mkdir(partial, 0o770); err != nil {
		return err
	}
	img := *s.image
	img.source = having{img.source, s.small}
	p := newPuller(&img, partial, PullOptions{})
	seek := dir + seekSuffix
	p.seek = newSeekMaker(seek + partialSuffix)
	err := p.prepare()
	var done []Pulled
	if err == nil {
		done, err = p.run(ctx)
	}
	if err == nil {
		err = syncTree(partial)
	}
	if err == nil && p.seek != nil && p.seek.done(done, p.files) == nil {
		_ = os.RemoveAll(seek) // without it, a removed image is fetched again
		_ = os.Rename(seek+partialSuffix, seek)
	}
	if err == nil {
		err = os.Rename(partial, dir)
	}
	_ = os.RemoveAll(seek + partialSuffix)
	if err != nil {
		return errors.Join(err, os.RemoveAll(partial))
	}
	return nil
}

// syncTree brings a directory and its files to storage, because they are not verified again.
func syncTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, name := range append([]string{"."}, namesOf(entries)...) {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

func namesOf(entries []fs.DirEntry) (names []string) {
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// open opens a disk. Its identity comes from the digest of the manifest.
func (d *pulledDisk) open(_ context.Context, name string) (image.Source, error) {
	if d.seek != nil {
		if disk := d.seek.disks[name]; disk != nil {
			return disk, nil
		}
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	f, err := os.Open(filepath.Join(d.dir, name))
	if err != nil {
		return nil, err
	}
	src, err := image.NewFileSource(f, rawDigest(filepath.Base(d.dir), name))
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return src, nil
}

// rawDigest names a raw file that was made from an image.
func rawDigest(manifest, name string) string {
	return digestOf([]byte("kubevirt-disk raw\n" + keptName(manifest) + "\n" + name))
}

func (d *pulledDisk) close() (err error) {
	d.touch()
	if d.seek != nil {
		err = d.seek.close()
	}
	return errors.Join(err, d.lock.Close())
}
