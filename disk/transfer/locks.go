package transfer

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"kubevirt.io/disk/internal/durable"
)

// locks are the locks of disks and volumes, which daemons would take.
type locks []*os.File

// take locks the disks in a directory and below it: a single disk, the disks of several images, and
// those of volumes, whose directory has a lock of its own. After an error, the locks taken so far
// stay.
func (l *locks) take(dir string) (disks int, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		acquire := durable.AcquireExistingLock
		switch place, name := filepath.Dir(path), filepath.Base(path); {
		case path == dir:
			return err
		case d.IsDir() && skipped(name, true):
			return fs.SkipDir
		case err != nil || d.IsDir():
			return err
		case name == diskName:
			disks++
			path, acquire = filepath.Join(place, lockName), durable.AcquireLock
		case name != lockName && name != durable.LockName:
			return nil
		}
		if slices.ContainsFunc(*l, func(f *os.File) bool { return f.Name() == path }) {
			return nil
		}
		lock, err := acquire(path, filepath.Dir(path))
		if err == nil {
			*l = append(*l, lock)
		}
		return err
	})
	return disks, err
}

// Close releases the locks.
func (l locks) Close() (err error) {
	for _, lock := range l {
		err = errors.Join(err, durable.ReleaseLock(lock))
	}
	return err
}
