package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/transport"
)

// fetchedDir is a subdirectory of the cache's directory. It has the disks of images that are
// fetched as a whole, because no part of them can be fetched alone:
//
//	pulled/sha256-DIGEST.raw/NAME  a disk as a raw file, of the image with that manifest
//	pulled/sha256-DIGEST.disks     their names, because one of them may be removed by hand
//	pulled/sha256-DIGEST.lock      locked exclusively to fetch or remove them, shared to serve them
//
// The directory of the disks gets its name when all of them are verified and on storage. Its time
// is that of the last use. The lock stays when they are removed.
const (
	fetchedDir = "pulled"
	rawSuffix  = ".raw"
	listSuffix = ".disks"
	lockSuffix = ".lock"
)

// fetchedImage is an image whose disks were fetched as a whole.
type fetchedImage struct {
	s     *Stream
	root  *osfile.Shared // of the cache
	base  string         // in root; prefix of the names of all files of the image
	lock  *os.File
	names []string // of the disks
}

// lockPoll is how often to check whether another process has fetched the image.
const lockPoll = 100 * time.Millisecond

func (s *Stream) fetchedBase() string {
	return path.Join(fetchedDir, keptName(s.image.Digest))
}

func (f *fetchedImage) dir() string { return f.base + rawSuffix }

// partialName is a new name for disks that do not count yet, or not any more.
func partialName(base string) string {
	return fmt.Sprintf("%s.partial%08x", base, rand.Uint32())
}

// fetchedBefore reports whether the image was fetched before. Then there is no need to look into
// it.
func (s *Stream) fetchedBefore() bool {
	root, err := osfile.OpenRoot(s.opt.CacheDir)
	if err != nil {
		return false
	}
	defer root.Close()
	_, err = root.Stat(s.fetchedBase() + rawSuffix)
	return err == nil
}

// errGone says that the image was not fetched, or was removed.
var errGone = errors.New("the fetched image is not there")

// fetch fetches and verifies the disks of the image, unless a process has done so before. why is
// reported to a person, because this takes long.
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
	f := &fetchedImage{s: s, root: root, base: s.fetchedBase()}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if err := root.Mkdir(fetchedDir); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if f.lock, err = root.OpenFile(f.base+lockSuffix, os.O_RDWR|os.O_CREATE); err != nil {
		return nil, fmt.Errorf("a fetched image cannot be locked: %w", err)
	}
	root.Share(f.lock)
	for err = f.find(); errors.Is(err, errGone); err = f.find() {
		alone := flock.Lock(f.lock, unix.LOCK_EX|unix.LOCK_NB)
		if alone != nil && !errors.Is(alone, unix.EWOULDBLOCK) {
			return nil, alone
		}
		// Another process has the lock. A shared one means that it serves disks whose directory
		// was removed. An exclusive one means that it is fetching them: wait for it.
		if alone != nil && flock.Lock(f.lock, unix.LOCK_SH|unix.LOCK_NB) != nil {
			if err := transport.PauseFor(ctx, lockPoll); err != nil {
				return nil, err
			}
			continue
		}
		if err = f.find(); !errors.Is(err, errGone) {
			break
		}
		if alone == nil {
			if err := removeAll(root, f.base); err != nil {
				return nil, err
			}
		}
		if err := f.bring(ctx, why); err != nil {
			return nil, err
		}
		if err = f.find(); errors.Is(err, errGone) {
			return nil, fmt.Errorf("what was fetched is not in %q any more: look who removes "+
				"files of the cache", f.dir())
		}
		break
	}
	if err == nil {
		err = flock.Lock(f.lock, unix.LOCK_SH)
	}
	if err == nil {
		err = f.find()
	}
	if err != nil {
		return nil, err
	}
	f.touch()
	return f, nil
}

// find lists the disks. It returns errGone unless the image was fetched and is complete. Earlier
// versions have stored no names. What is damaged is fetched again, but not what cannot be opened
// only now: the registry may be away.
func (f *fetchedImage) find() error {
	f.names = nil
	entries, err := fs.ReadDir(f.root.FS(), f.dir())
	for _, e := range entries {
		if !e.Type().IsRegular() { // this was not fetched
			return errGone
		}
		f.names = append(f.names, e.Name())
	}
	list, listErr := readIn(f.root.Root, f.base+listSuffix, maxRecord)
	for _, passes := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ESTALE} {
		if err := errors.Join(err, listErr); errors.Is(err, passes) {
			return err
		}
	}
	named := listErr == nil && string(list) == listText(f.names)
	if err == nil && len(f.names) > 0 && (named || errors.Is(listErr, fs.ErrNotExist)) {
		return nil
	}
	return errGone
}

// listText is the content of the file with the names of disks.
func listText(names []string) string {
	slices.Sort(names)
	return fmt.Sprintf("%q\n", names)
}

// bring fetches and verifies the image, and puts its disks into their directory. A disk that is
// open in a former directory stays open.
func (f *fetchedImage) bring(ctx context.Context, why string) (err error) {
	f.s.client.Warn(fmt.Sprintf("%s is fetched and verified before it is served, as it has no "+
		"index of its disks: %s", f.s.ref, why))
	partial := partialName(f.base)
	if err := f.root.Mkdir(partial); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.root.RemoveAll(partial))
		}
	}()
	p := newPuller(f.s.image, partial, PullOptions{UnpackMemory: f.s.opt.UnpackMemory})
	p.many, p.create = true, f.newRaw
	if _, err := p.run(ctx); err != nil {
		return err
	}
	dir, err := f.root.OpenFile(partial, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	names, err := dir.Readdirnames(-1)
	if err := errors.Join(err, dir.Sync(), dir.Close()); err != nil {
		return err
	}
	list, err := f.root.OpenFile(f.base+listSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	f.root.Share(list)
	_, err = list.WriteString(listText(names))
	if err := errors.Join(err, list.Close()); err != nil {
		return err
	}
	return f.moveIntoPlace(partial)
}

// moveIntoPlace gives fetched disks their directory, unless there is one that another process has
// made. It looks at an existing directory only when that is in the way: an earlier look would be
// out of date.
func (f *fetchedImage) moveIntoPlace(partial string) error {
	if err := f.root.Rename(partial, f.dir()); err == nil {
		return nil
	}
	if err := f.find(); err == nil {
		return f.root.RemoveAll(partial)
	} else if !errors.Is(err, errGone) {
		return err
	}
	if err := f.root.RemoveAll(f.dir()); err != nil { // its content is different
		return err
	}
	return f.root.Rename(partial, f.dir())
}

// newRaw begins a raw file. It is synced, because damage by a crash would not be noticed later.
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

// openDisk opens a disk. Its identity comes from the digest of the manifest.
func (f *fetchedImage) openDisk(_ context.Context, name string) (image.Source, error) {
	file, err := osfile.OpenRegularIn(f.root.Root, path.Join(f.dir(), name))
	if err != nil {
		return nil, err
	}
	s, err := image.NewFileSource(file, transport.DigestOf([]byte("kubevirt-disk raw\n"+
		keptName(f.s.image.Digest)+"\n"+name)))
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return s, nil
}

// touch records that the image is used. Anybody who may write to a directory may set its times to
// now. If that fails, the image may be removed too early.
func (f *fetchedImage) touch() {
	if dir, err := f.root.OpenFile(f.dir(), os.O_RDONLY); err == nil {
		_ = unix.Futimes(int(dir.Fd()), nil)
		dir.Close()
	}
}

func (f *fetchedImage) close() (err error) {
	if f.lock != nil {
		f.touch()
		err = f.lock.Close()
	}
	return errors.Join(err, f.root.Close())
}
