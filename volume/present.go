package volume

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/volume/store"
)

// markName is a file in a directory that will have a disk. Where no other file is yet, it tells the
// storage from an empty mount point, which must not be filled in its place.
const markName = diskName + ".volume"

// mark begins to use a directory that is not made for the volume alone.
func mark(dir, name string) error {
	return durable.Write(filepath.Join(dir, markName), 0o600, func(f *os.File) error {
		_, err := fmt.Fprintln(f, name)
		return err
	})
}

// unmark removes the mark of a volume whose disk is there. One that stays goes with the volume.
func (m *Manager) unmark(r store.Record) {
	if !r.Marked {
		return
	}
	dir, err := m.dir(r)
	if err == nil {
		err = osfile.Remove(filepath.Join(dir, markName))
	}
	if err != nil {
		m.log.Warn("a file that is not needed any more could not be removed",
			zap.String("volume", r.Name), zap.String("file", markName), zap.Error(err))
	}
}

// missingError says that the storage of a volume is not there.
type missingError struct{ what, path string }

func (e *missingError) Error() string {
	return fmt.Sprintf("%s is missing: mount its storage, or put back %q; the volume comes back "+
		"then by itself", e.what, e.path)
}

func (e *missingError) Unwrap() error { return fs.ErrNotExist }

// present looks whether the storage of a volume is there. For the disk of a volume that is served,
// Disks.Open does the same.
func (m *Manager) present(r store.Record) error {
	dir, err := m.dir(r)
	if err != nil || r.Place.Kind == store.PlaceOwn {
		return err
	}
	names, err := osfile.Names(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	switch {
	case r.State == store.StateReady:
		if !slices.Contains(names, diskName) {
			return &missingError{"the disk was made, and", filepath.Join(dir, diskName)}
		}
	case err != nil || r.Marked && !slices.ContainsFunc(names, isDiskFile):
		return &missingError{"the storage that the disk is to be made on", dir}
	}
	return nil
}

// presentOnClaim looks for the disk of a volume on a claim, which nobody opens here.
func (m *Manager) presentOnClaim(v *volume) error {
	if err := m.present(v.record); err != nil {
		return err
	}
	m.fail(v, nil)
	return nil
}
