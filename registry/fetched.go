package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/transport"
)

// fetchedDir is the directory inside that of the cache for the disks of images that are fetched as
// a whole, because no part of them can be fetched alone:
//
//	pulled/sha256-DIGEST/NAME     a disk as a raw file, of the image with that manifest
//	pulled/sha256-DIGEST.digests  the digests of the chunks of these files: fetchedDisks
//	pulled/sha256-DIGEST.lock     locked by whoever fetches or removes them (alone), or serves them
//	                              (shared)
//
// The lock stays when the disks are removed. The time of the directory says when it was last used.
const fetchedDir = "pulled"

// fetchedImage is an image whose disks were fetched as a whole. If a chunk of one is missing or
// wrong later, the whole image is fetched again.
type fetchedImage struct {
	s     *Stream
	root  *osfile.Shared // of the cache
	dir   string         // in it
	lock  *os.File
	disks *fetchedDisks

	life context.Context // of fetching again, which is for nobody in particular
	end  context.CancelFunc
	work sync.WaitGroup

	mu    sync.Mutex
	again *again    // guarded by mu; under way; nil: none is
	last  time.Time // guarded by mu; when it was fetched again
}

// again is a run of fetching the image again.
type again struct {
	done chan struct{} // closed when err is set
	err  error
}

const (
	// lockPoll is how often to look whether another process has fetched the image.
	lockPoll = 100 * time.Millisecond
	// againPause is the least time between two runs of fetching again. If what was just fetched is
	// wrong, storage changes it.
	againPause = 10 * time.Minute
)

func (s *Stream) fetchedPath() string {
	return path.Join(fetchedDir, keptName(s.image.Digest))
}

// fetchedBefore reports whether somebody has fetched the image. Then there is no need to look into
// it.
func (s *Stream) fetchedBefore() bool {
	root, err := osfile.OpenRoot(s.opt.CacheDir)
	if err != nil {
		return false
	}
	defer root.Close()
	_, err = root.Stat(s.fetchedPath() + digestsSuffix)
	return err == nil
}

// errGone is an image that was removed before it could be locked.
var errGone = errors.New("the fetched image was removed")

// fetch fetches and verifies the disks of the image, unless a process has done so before. why goes
// to a person, because this takes long.
func (s *Stream) fetch(ctx context.Context, why string) (*fetchedImage, error) {
	for {
		f, err := s.fetchOnce(ctx, why)
		if !errors.Is(err, errGone) {
			return f, err
		}
	}
}

func (s *Stream) fetchOnce(ctx context.Context, why string) (_ *fetchedImage, err error) {
	root, err := osfile.OpenShared(s.opt.CacheDir, 0o770)
	if err != nil {
		return nil, err
	}
	f := &fetchedImage{s: s, root: root, dir: s.fetchedPath()}
	f.life, f.end = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if err := root.Mkdir(fetchedDir); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if f.lock, err = root.OpenFile(f.dir+lockSuffix, os.O_RDWR|os.O_CREATE); err != nil {
		return nil, fmt.Errorf("a fetched image cannot be locked: %w", err)
	}
	root.Share(f.lock)
	for f.load() != nil {
		alone := flock.Lock(f.lock, unix.LOCK_EX|unix.LOCK_NB)
		if alone != nil && !errors.Is(alone, unix.EWOULDBLOCK) {
			return nil, alone
		}
		// Another process has the lock. A shared one means that it serves disks whose record is
		// gone. An exclusive one means that it is fetching them: wait for it.
		if alone != nil && flock.Lock(f.lock, unix.LOCK_SH|unix.LOCK_NB) != nil {
			if err := transport.PauseFor(ctx, lockPoll); err != nil {
				return nil, err
			}
			continue
		}
		if f.load() == nil {
			break
		}
		if alone == nil {
			if err := root.RemoveAll(f.dir); err != nil {
				return nil, err
			}
		}
		if err := f.bring(ctx, why); err != nil {
			return nil, err
		}
		if err := f.load(); err != nil {
			return nil, fmt.Errorf("what was fetched cannot be read again: %w", err)
		}
		break
	}
	if err := flock.Lock(f.lock, unix.LOCK_SH); err != nil {
		return nil, err
	}
	if f.load() != nil {
		return nil, errGone
	}
	f.touch()
	return f, nil
}

// load reads which disks there are.
func (f *fetchedImage) load() error {
	disks, err := loadFetchedDisks(f.root, f.dir+digestsSuffix, f.s.kept.dir)
	if err != nil {
		return err
	}
	err = f.disks.close()
	f.disks = disks
	return err
}

// bring fetches the image, and puts its disks into the directory. An open file
// of an earlier disk stays as it is.
func (f *fetchedImage) bring(ctx context.Context, why string) (err error) {
	f.s.client.Warn(fmt.Sprintf("%s is fetched and verified before it is served, as it has no "+
		"index of its disks: %s", f.s.ref, why))
	if err := f.root.MkdirAll(f.dir); err != nil {
		return err
	}
	p := newPuller(f.s.image, f.dir, PullOptions{UnpackMemory: f.s.opt.UnpackMemory})
	p.many = true
	partial := fmt.Sprintf(".partial%08x", rand.Uint32())
	p.create = func(name string) (*image.Destination, error) {
		return f.newRaw(name + partial)
	}
	done, err := p.run(ctx)
	defer func() {
		for _, one := range append(done, Pulled{To: f.dir + digestsSuffix}) {
			err = errors.Join(err, orMissing(f.root.Remove(one.To+partial)))
		}
	}()
	if err == nil {
		err = f.save(ctx, done, partial)
	}
	for _, one := range done {
		if err == nil {
			err = f.root.Rename(one.To+partial, one.To)
		}
	}
	if err != nil {
		return err
	}
	dir, err := f.root.OpenFile(f.dir, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return err
	}
	return f.root.Rename(f.dir+digestsSuffix+partial, f.dir+digestsSuffix)
}

// newRaw begins a raw file. It is brought to storage, because nobody notices otherwise that a crash
// has damaged it before it is read again.
func (f *fetchedImage) newRaw(name string) (*image.Destination, error) {
	file, err := f.root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return nil, err
	}
	f.root.Share(file)
	return image.NewDestination(file, func(err error) error {
		if err == nil {
			err = file.Sync()
		}
		if err = errors.Join(err, file.Close()); err != nil {
			err = errors.Join(err, f.root.Remove(name))
		}
		return err
	}), nil
}

// fetchAgain fetches the image again, because something of it is missing or wrong.
func (f *fetchedImage) fetchAgain(ctx context.Context, name string, chunk int64) error {
	f.mu.Lock()
	run := f.again
	if run == nil {
		if !f.last.IsZero() && time.Since(f.last) < againPause {
			f.mu.Unlock()
			return fmt.Errorf("chunk %d of %s does not match its digest although the image was "+
				"fetched again: check the storage of the cache directory", chunk,
				path.Join(f.dir, name))
		}
		f.s.opt.Cache.NoteDamaged()
		run = &again{done: make(chan struct{})}
		f.again = run
		f.work.Go(func() {
			run.err = f.bring(f.life, fmt.Sprintf("chunk %d of %s in the cache does not match its "+
				"digest", chunk, name))
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.again = nil; run.err == nil {
				f.last = time.Now()
			}
			close(run.done)
		})
	}
	f.mu.Unlock()
	select {
	case <-run.done:
		return run.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// touch records that the image is used. Whoever may write to a directory may set its times to now.
// If that fails, the image may be removed too early.
func (f *fetchedImage) touch() {
	if dir, err := f.root.OpenFile(f.dir, os.O_RDONLY); err == nil {
		_ = unix.Futimes(int(dir.Fd()), nil)
		dir.Close()
	}
}

// rawDigest names a raw file that was made from an image.
func rawDigest(manifest, name string) string {
	return transport.DigestOf([]byte("kubevirt-disk raw\n" + keptName(manifest) + "\n" + name))
}

func (f *fetchedImage) close() (err error) {
	f.end()
	f.work.Wait()
	if f.lock != nil {
		f.touch()
		err = f.lock.Close()
	}
	return errors.Join(err, f.disks.close(), f.root.Close())
}
