package volume

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// diskName is the prefix of all files of a disk.
const diskName = "disk.img"

func nowUTC() time.Time { return time.Now().UTC().Truncate(time.Second) }

// place returns the place of a new volume's disk.
func (m *Manager) place(name string, spec api.Spec) store.Place {
	switch {
	case spec.PVC != nil:
		return store.Place{Kind: store.PlaceClaim, Name: spec.PVC.Name}
	case spec.Copy.UsageType != "":
		return store.Place{Kind: store.PlaceUsageType, Name: spec.Copy.UsageType}
	case name == api.DefaultName && m.opt.Disks.Single():
		return store.Place{Kind: store.PlaceRoot}
	}
	return store.Place{}
}

// dir is the directory of a volume's disk.
func (m *Manager) dir(r store.Record) (string, error) {
	if r.Place.Kind == store.PlaceOwn {
		return m.store.Dir(r.Name), nil
	}
	dir, err := m.opt.Disks.Place(r.Place)
	if err == nil {
		dir, err = m.resolvedDir(dir)
	}
	if err == nil && r.Place.Kind == store.PlaceUsageType {
		// Other servers may keep volumes in it, too.
		dir = filepath.Join(dir, ".volumes", m.store.ID(), r.Name)
	}
	return dir, err
}

// resolvedDir resolves the links in a directory that the operator has named, once for each name.
// Links are not followed later, nor below the directory: other users may write to a claim, or to
// the storage of a usage type. A directory that does not exist may come back, so it is resolved
// again.
func (m *Manager) resolvedDir(dir string) (string, error) {
	if resolved, ok := m.resolved.Load(dir); ok {
		return resolved.(string), nil
	}
	resolved, err := osfile.Resolved(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return dir, nil
	}
	if err == nil {
		m.resolved.Store(dir, resolved)
	}
	return resolved, err
}

// occupy makes the directory of a volume on another storage, or marks one that exists. Several
// servers may use the storage, so a system call decides which is first, and not a look before.
// After an error nothing in it is the volume's.
func (m *Manager) occupy(r store.Record, dir string) error {
	var err error
	if r.Place.Kind == store.PlaceUsageType {
		if err = makePlace(dir); errors.Is(err, fs.ErrExist) {
			return api.Errorf(api.CodeInUse, "%q is there already, perhaps of a volume that was "+
				"deleted while this storage was away: move it away, or use another name", dir)
		}
	} else if err = m.mark(r, dir); errors.Is(err, fs.ErrExist) {
		return api.Errorf(api.CodeInUse, "%q has a disk already: remove %s* there, or use another "+
			"claim", dir, diskName)
	}
	if err != nil {
		return fmt.Errorf("the directory of the volume %q cannot be used: %w", r.Name, err)
	}
	return nil
}

// vacate removes what a kill may have left of occupy, before the record said so.
func (m *Manager) vacate(r store.Record) error {
	dir, err := m.dir(r)
	if err != nil {
		return err
	}
	if r.Place.Kind != store.PlaceUsageType {
		return m.removeMark(r, dir)
	}
	if err := osfile.Remove(dir); !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil // it is another volume's
}

// makePlace makes the directory of a volume. The storage's own directory must exist.
func makePlace(dir string) error {
	above := filepath.Dir(dir)
	for _, name := range []string{filepath.Dir(above), above} {
		if err := osfile.MakeDir(name); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := osfile.MakeDir(dir); err != nil {
		return err
	}
	for _, name := range []string{dir, above, filepath.Dir(above)} {
		if err := durable.SyncParent(name); err != nil {
			return errors.Join(err, osfile.Remove(dir))
		}
	}
	return nil
}

func isDiskFile(name string) bool { return strings.HasPrefix(name, diskName) }

func diskFiles(dir string) (paths []string, err error) {
	names, err := osfile.Names(dir)
	for _, name := range names {
		if isDiskFile(name) {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	return paths, err
}

// disposable lists the files of the disk in a directory, without those that the volume goes on
// using.
func disposable(dir string) (paths []string, err error) {
	paths, err = diskFiles(dir)
	return slices.DeleteFunc(paths, func(path string) bool {
		return filepath.Base(path) == markName
	}), err
}

// clear removes the disk of a volume and everything else except its record.
func (m *Manager) clear(r store.Record) error {
	dir, err := m.dir(r)
	if err != nil {
		return fmt.Errorf("its disk is kept: %w", err)
	}
	switch {
	case r.Place.Kind == store.PlaceOwn:
		return nil // it is removed with the record
	case r.Unmade:
		return nil // it may be another volume's
	}
	unlock, err := lockDisk(dir, durable.AcquireLock) // nobody makes a disk there from now on
	if err != nil {
		return err
	}
	defer unlock()
	if r.Place.Kind == store.PlaceUsageType {
		err = clearAll(dir, unlock)
	} else if err = clearDisk(dir); err == nil {
		err = osfile.Remove(filepath.Join(dir, markName))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// clearAll removes a directory. It closes the lock file before it removes it: on NFS, a removed
// file that is open gets another name, and its directory cannot be removed.
func clearAll(dir string, unlock func()) error {
	names, err := osfile.Names(dir)
	for _, name := range names {
		if name != durable.PersistentLockName {
			err = errors.Join(err, osfile.RemoveAll(filepath.Join(dir, name)))
		}
	}
	if err != nil {
		return err
	}
	unlock()
	return osfile.RemoveAll(dir)
}

// lockDisk locks a disk that will be removed, so that no server serves it. The directory of volumes
// may be a copy, such as a backup, whose records name disks that the original server serves.
func lockDisk(dir string, acquire func(path, what string) (*os.File, error)) (unlock func(),
	err error) {
	lock, err := acquire(filepath.Join(dir, durable.PersistentLockName), dir)
	switch locked := new(durable.LockedError); {
	case err == nil:
		return sync.OnceFunc(func() { _ = durable.ReleaseLock(lock) }), nil // it may be removed
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, errors.ErrUnsupported):
		return func() {}, nil // a server that serves a disk has made its directory, and locked it
	case errors.As(err, &locked):
		return nil, api.Errorf(api.CodeInUse, "the disk is kept: %v", err)
	}
	return nil, fmt.Errorf("the disk is kept, as another server may have it: %w", err)
}

// refuseServed refuses a volume whose disk another process serves.
func (m *Manager) refuseServed(r store.Record) error {
	dir, err := m.dir(r)
	if err != nil || r.Unmade || r.Place.Kind == store.PlaceOwn {
		return nil // clear gives a better error, and the store is locked
	}
	unlock, err := lockDisk(dir, durable.AcquireExistingLock)
	if err == nil {
		unlock()
	}
	return err
}

// refuseInMachine refuses a volume on a claim whose disk a machine has open.
func (m *Manager) refuseInMachine(r store.Record) error {
	dir, err := m.dir(r)
	if err != nil || r.Place.Kind != store.PlaceClaim || r.State != store.StateReady {
		return nil // clear gives a better error
	}
	f, err := osfile.OpenFile(filepath.Join(dir, diskName), os.O_RDONLY, 0)
	if err != nil {
		return nil // as above
	}
	defer f.Close()
	if flock.InMachine(f) {
		return api.Errorf(api.CodeInUse, "a virtual machine (QEMU) uses the disk of the volume "+
			"%q: stop it first, or delete the volume all the same with ?force=true", r.Name)
	}
	return nil
}

// clearDisk removes the files of the disk in a directory, which the volume goes on using.
func clearDisk(dir string) error {
	paths, err := disposable(dir)
	for _, path := range paths {
		err = errors.Join(err, osfile.RemoveAll(path))
	}
	if err != nil {
		return err
	}
	return durable.SyncDir(dir, (*os.File).Sync)
}
