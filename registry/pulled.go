package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
)

// pulledDir is the directory in that of the cache for the disks of images without an index:
//
//	pulled/sha256-DIGEST/NAME   a disk as a raw file, of the image with that manifest
//	pulled/sha256-DIGEST.lock   locked by whoever fetches it (alone) or serves it (shared)
const pulledDir = "pulled"

// pulledDisk is an image without an index, of which the disks were fetched as raw files.
type pulledDisk struct {
	dir   string
	lock  *os.File
	names []string
}

// lockPoll is how often it is looked whether another process has fetched the image.
const lockPoll = 100 * time.Millisecond

// pull fetches the disks of the image, and verifies them, unless a process has done so before.
func (s *Stream) pull(ctx context.Context) (_ *pulledDisk, err error) {
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
		err := unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			if d.there() {
				break
			}
			if err := s.pullInto(ctx, d.dir); err != nil {
				return nil, err
			}
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, &os.PathError{Op: "flock", Path: d.lock.Name(), Err: err}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(lockPoll):
		}
	}
	if err := unix.Flock(int(d.lock.Fd()), unix.LOCK_SH); err != nil {
		return nil, &os.PathError{Op: "flock", Path: d.lock.Name(), Err: err}
	}
	entries, err := os.ReadDir(d.dir)
	d.names = namesOf(entries)
	return d, err
}

func (d *pulledDisk) there() bool {
	_, err := os.Stat(d.dir)
	return err == nil
}

// pullInto makes the directory with the disks, which appears when it is complete.
func (s *Stream) pullInto(ctx context.Context, dir string) error {
	s.client.opt.Warn(fmt.Sprintf("%s has no index of its disks: its layers are fetched and "+
		"verified before it is served", s.ref))
	partial := dir + ".partial"
	if err := os.RemoveAll(partial); err != nil {
		return err
	}
	if err := os.Mkdir(partial, 0o770); err != nil {
		return err
	}
	p := newPuller(s.image, partial, PullOptions{})
	err := p.prepare()
	if err == nil {
		_, err = p.run(ctx)
	}
	if err == nil {
		err = syncTree(partial)
	}
	if err == nil {
		err = os.Rename(partial, dir)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(partial))
	}
	return nil
}

// syncTree brings a directory and its files to storage: they are not verified again.
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

// open opens a disk. Its identity is the manifest's, which has vouched for it.
func (d *pulledDisk) open(_ context.Context, name string) (image.Source, error) {
	f, err := os.Open(filepath.Join(d.dir, name))
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte("kubevirt-disk raw\n" + filepath.Base(d.dir) + "\n" + name))
	src, err := image.NewFileSource(f, "sha256:"+hex.EncodeToString(sum[:]))
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return src, nil
}

func (d *pulledDisk) close() error { return d.lock.Close() }
