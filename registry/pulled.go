package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/transport"
)

// pulledDir is the directory inside that of the cache for the disks of images without an index:
//
//	pulled/sha256-DIGEST/NAME     a disk as a raw file, of the image with that manifest
//	pulled/sha256-DIGEST.digests  the digests of the chunks of these files: rawDigests
//	pulled/sha256-DIGEST.seek/    what it takes to read it by ranges when it was removed: seekMaker
//	pulled/sha256-DIGEST.lock     locked by whoever fetches or removes it (alone), or serves it
//	                              (shared)
//	pulled/sha256-DIGEST.again... the same for who fetches a damaged image again while it is served
//
// The lock stays when the disks are removed. The time of the directory says when it was last used.
const pulledDir = "pulled"

// pulledDisk is an image without an index whose disks were fetched as raw files.
type pulledDisk struct {
	root    *osfile.Shared // of the cache
	dir     string         // in it
	lock    *os.File
	names   []string
	digests *rawDigests
	missing error      // why there returned false
	seek    *seekDisks // nil: the raw files are there
	mend    *mender    // of damaged raw files
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
	root, err := osfile.OpenRoot(s.opt.CacheDir)
	if err != nil {
		return false
	}
	defer root.Close()
	dir := path.Join(pulledDir, keptName(s.image.Digest))
	for _, there := range []string{dir, dir + seekSuffix} {
		if _, err := root.Stat(there); err == nil {
			return true
		}
	}
	return false
}

// errGone is an image that was removed before it could be locked.
var errGone = errors.New("the fetched image was removed")

func (s *Stream) pullOnce(ctx context.Context, why string) (_ *pulledDisk, err error) {
	root, err := osfile.OpenShared(s.opt.CacheDir, 0o770)
	if err != nil {
		return nil, err
	}
	d := &pulledDisk{root: root, dir: path.Join(pulledDir, keptName(s.image.Digest))}
	d.mend = newMender(s, d)
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if err := root.Mkdir(pulledDir); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if d.lock, err = openLock(root, d.dir); err != nil {
		return nil, err
	}
	fetched := false
	for !d.there() {
		err := flock.Lock(d.lock, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			if d.there() {
				break
			}
			if d.seek, err = s.openSeekDisks(ctx, root.Root, d.dir+seekSuffix); err != nil {
				return nil, err
			}
			if d.seek != nil {
				_ = root.RemoveAll(d.dir) // nothing says whether it is right, so nobody needs it
				break
			}
			if err := s.pullInto(ctx, root, d.dir, d.dir+seekSuffix, why); err != nil {
				return nil, err
			}
			fetched = true
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, err
		}
		if _, err := root.Stat(d.dir); err == nil &&
			flock.Lock(d.lock, unix.LOCK_SH|unix.LOCK_NB) == nil {
			// Somebody serves it, so it cannot be removed, but nothing says any more what it was.
			if err := s.pullAgain(ctx, root, d.dir, d.there); err != nil {
				return nil, err
			}
			fetched = true
			break
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
	switch {
	case d.seek != nil:
		d.names = d.seek.names()
	case d.there():
		d.names = d.digests.names()
	case fetched && !errors.Is(d.missing, fs.ErrNotExist):
		return nil, fmt.Errorf("what was fetched cannot be read again: %w", d.missing)
	default:
		return nil, errGone
	}
	d.touch()
	return d, nil
}

// openLock opens the file that is locked for an image.
func openLock(root *osfile.Shared, dir string) (*os.File, error) {
	lock, err := root.OpenFile(dir+lockSuffix, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, fmt.Errorf("a fetched image cannot be locked: %w", err)
	}
	root.Share(lock)
	return lock, nil
}

// touch records that the image is used. Whoever may write to a directory may set its times to now.
// If that fails, the image may be removed too early.
func (d *pulledDisk) touch() {
	for _, dir := range []string{d.dir, d.dir + seekSuffix} {
		if f, err := d.root.OpenFile(dir, os.O_RDONLY); err == nil {
			_ = unix.Futimes(int(f.Fd()), nil)
			f.Close()
		}
	}
}

// Others are the images that were fetched as a whole into the directory of a cache. They are for
// cache.Options.
func Others(cacheDir string) func() ([]cache.Other, error) {
	return func() (all []cache.Other, err error) {
		root, err := osfile.OpenRoot(cacheDir)
		if err != nil {
			return nil, orMissing(err)
		}
		defer root.Close()
		entries, err := fs.ReadDir(root.FS(), pulledDir)
		if err != nil {
			return nil, orMissing(err)
		}
		for _, e := range entries {
			if name, ok := strings.CutSuffix(e.Name(), lockSuffix); ok && err == nil {
				dir := path.Join(pulledDir, name)
				var before time.Time
				for _, what := range [][]string{
					{dir, dir + digestsSuffix, dir + partialSuffix,
						dir + digestsSuffix + partialSuffix},
					{dir + seekSuffix, dir + seekSuffix + partialSuffix}} {
					var o cache.Other
					var otherErr error
					if o, otherErr = otherOf(root, cacheDir, dir, what); o.Bytes > 0 {
						if !o.Used.After(before) { // what is removed first comes first
							o.Used = before.Add(1)
						}
						all, before = append(all, o), o.Used
					}
					err = errors.Join(err, otherErr)
				}
			}
		}
		return all, err
	}
}

// orMissing ignores that something does not exist.
func orMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// otherOf returns the files of a fetched image, including the remains of fetching it.
func otherOf(root *os.Root, cacheDir, dir string, what []string) (cache.Other, error) {
	o := cache.Other{Name: filepath.Join(cacheDir, what[0]),
		Remove: func() error { return removePulled(cacheDir, dir, what) }}
	for _, name := range what {
		err := fs.WalkDir(root.FS(), name, func(_ string, d fs.DirEntry, err error) error {
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
		if orMissing(err) != nil { // otherwise it was removed meanwhile
			return cache.Other{}, err
		}
	}
	return o, nil
}

// removePulled removes the disks of a fetched image, unless somebody fetches or serves it.
func removePulled(cacheDir, dir string, what []string) error {
	root, err := osfile.OpenShared(cacheDir, 0o770)
	if err != nil {
		return err
	}
	defer root.Close()
	lock, err := root.OpenFile(dir+lockSuffix, os.O_RDWR)
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
	for _, name := range what {
		err = errors.Join(err, root.RemoveAll(name))
	}
	return err
}

const (
	// partialSuffix ends the names of unfinished files.
	partialSuffix = ".partial"
	lockSuffix    = ".lock"
	// againSuffix ends the name of an image that is fetched again while it is served.
	againSuffix = ".again"
)

// there reports whether the disks are there, with their digests.
func (d *pulledDisk) there() bool {
	if _, d.missing = d.root.Stat(d.dir); d.missing == nil {
		_ = d.digests.close()
		d.digests, d.missing = loadRawDigests(d.root, d.dir+digestsSuffix, d.mend.s.kept.dir)
	}
	return d.missing == nil
}

// pullInto makes the directory with the disks. The directory appears when it is complete.
func (s *Stream) pullInto(ctx context.Context, root *osfile.Shared, dir, seek, why string) error {
	s.client.Warn(fmt.Sprintf("%s is fetched and verified before it is served, as it has no "+
		"index of its disks: %s", s.ref, why))
	partial := dir + partialSuffix
	for _, name := range []string{partial, dir} {
		if err := root.RemoveAll(name); err != nil {
			return err
		}
	}
	if err := root.Mkdir(partial); err != nil {
		return err
	}
	img := *s.image
	img.Source = having{img.Source, s.small}
	p := newPuller(&img, partial, PullOptions{UnpackMemory: s.opt.UnpackMemory})
	p.many = true
	p.create = func(name string) (*image.Destination, error) { return newRaw(root, name) }
	p.seek = newSeekMaker(root, seek+partialSuffix)
	done, err := p.run(ctx)
	if err == nil {
		err = saveRawDigests(ctx, root, dir+digestsSuffix, done)
	}
	if err == nil {
		err = syncDir(root, partial)
	}
	if err == nil && p.seek != nil && p.seek.done(done, p.files) == nil {
		_ = root.RemoveAll(seek) // without it, a removed image is fetched again
		_ = root.Rename(seek+partialSuffix, seek)
	}
	if err == nil {
		err = root.Rename(partial, dir)
	}
	_ = root.RemoveAll(seek + partialSuffix)
	if err != nil {
		return errors.Join(err, root.RemoveAll(partial))
	}
	return nil
}

// newRaw begins a raw file. It is brought to storage, because nobody notices otherwise that a crash
// has damaged it before it is read again.
func newRaw(root *osfile.Shared, name string) (*image.Destination, error) {
	f, err := root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return nil, err
	}
	root.Share(f)
	return image.NewDestination(f, func(err error) error {
		if err == nil {
			err = f.Sync()
		}
		if err = errors.Join(err, f.Close()); err != nil {
			err = errors.Join(err, root.Remove(name))
		}
		return err
	}), nil
}

// pullAgain fetches an image again whose files somebody serves, and exchanges them one by one. Who
// has one open keeps it. done reports whether another process has done so meanwhile.
func (s *Stream) pullAgain(ctx context.Context, root *osfile.Shared, dir string,
	done func() bool) (err error) {
	again := dir + againSuffix
	lock, err := openLock(root, again)
	if err != nil {
		return err
	}
	defer lock.Close()
	for {
		if err = flock.Lock(lock, unix.LOCK_EX|unix.LOCK_NB); err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if err := transport.PauseFor(ctx, lockPoll); err != nil {
			return err
		}
	}
	if done() {
		return nil
	}
	defer func() {
		err = errors.Join(err, root.RemoveAll(again), root.RemoveAll(again+digestsSuffix))
	}()
	err = s.pullInto(ctx, root, again, dir+seekSuffix, "what was fetched before is damaged")
	if err != nil {
		return err
	}
	digests, err := loadRawDigests(root, again+digestsSuffix, s.kept.dir)
	if err != nil {
		return err
	}
	defer digests.close()
	if err := root.Mkdir(dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	for _, name := range digests.names() {
		err = errors.Join(err, root.Rename(path.Join(again, name), path.Join(dir, name)))
	}
	if err == nil {
		err = syncDir(root, dir)
	}
	if err == nil {
		err = root.Rename(again+digestsSuffix, dir+digestsSuffix)
	}
	return err
}

// syncDir makes the names in a directory durable.
func syncDir(root *osfile.Shared, name string) error {
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// open opens a disk. Its identity comes from the digest of the manifest.
func (d *pulledDisk) open(_ context.Context, name string) (image.Source, error) {
	if d.seek != nil {
		if disk := d.seek.disks[name]; disk != nil {
			return disk, nil
		}
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return newRawDisk(d, name)
}

// rawDigest names a raw file that was made from an image.
func rawDigest(manifest, name string) string {
	return transport.DigestOf([]byte("kubevirt-disk raw\n" + keptName(manifest) + "\n" + name))
}

func (d *pulledDisk) close() (err error) {
	d.touch()
	err = d.mend.close()
	if d.seek != nil {
		err = errors.Join(err, d.seek.close())
	}
	if d.lock != nil {
		err = errors.Join(err, d.lock.Close())
	}
	err = errors.Join(err, d.digests.close())
	return errors.Join(err, d.root.Close())
}
