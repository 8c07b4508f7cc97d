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

// markName is a file in a directory that will have a disk. If the directory has no other file yet,
// the mark tells the storage from an empty mount point, which must not be filled in its place.
const markName = diskName + ".volume"

// mark begins to use a directory that was not made for the volume alone. If it has a disk or a
// mark, mark changes nothing, and the error is fs.ErrExist.
func (m *Manager) mark(r store.Record, dir string) error {
	p, err := durable.CreateNamed(filepath.Join(dir, markName), 0o600, func(*os.File) error {
		return fs.ErrExist
	})
	if err != nil {
		return err
	}
	_, err = p.File.WriteString(m.markText(r))
	err = p.FinishSynced(err)
	if err == nil {
		var others []string
		if others, err = disposable(dir); len(others) > 0 {
			err = errors.Join(err, fs.ErrExist)
		}
	}
	if err != nil {
		return errors.Join(err, m.removeMark(r, dir))
	}
	return nil
}

// markText is the content of a volume's mark.
func (m *Manager) markText(r store.Record) string { return r.Name + " " + m.store.ID() + "\n" }

// removeMark removes the mark of a volume, and no other.
func (m *Manager) removeMark(r store.Record, dir string) error {
	path := filepath.Join(dir, markName)
	text, err := durable.Read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && string(text) != m.markText(r):
		return nil
	case err != nil:
		return fmt.Errorf("%q %w", path, err)
	}
	return osfile.Remove(path)
}

// unmark removes the mark of a volume whose disk exists. If that fails, it goes with the volume.
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

// missingError says that the storage of a volume is missing, or was missing until now.
type missingError struct {
	what, path string
	tried      error // why the disk cannot be served although its storage is back; nil: it is not
}

func (e *missingError) Error() string {
	if e.tried != nil {
		return fmt.Sprintf("its storage was missing and is back, but: %v; this is tried again by "+
			"itself", e.tried)
	}
	return fmt.Sprintf("%s is missing: mount its storage, or put back %q; the volume comes back "+
		"then by itself", e.what, e.path)
}

func (e *missingError) Unwrap() error { return fs.ErrNotExist }

// stateName is the file with the identity of the disk.
const stateName = diskName + ".state"

// find checks whether the storage of a volume is there, and whether it has a disk. A disk that was
// made is never made again, and no disk is made in an empty mount point.
func (m *Manager) find(r store.Record) (dir string, there bool, err error) {
	if dir, err = m.dir(r); err != nil {
		return "", false, err
	}
	names, err := osfile.Names(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", false, err
	}
	there = slices.Contains(names, diskName)
	switch {
	case r.State == store.StateReady:
		for _, name := range []string{diskName, stateName} {
			if !slices.Contains(names, name) {
				return "", false, &missingError{what: "the disk was made, and",
					path: filepath.Join(dir, name)}
			}
		}
	case r.Place.Kind == store.PlaceOwn:
	case err != nil || r.Marked && !slices.ContainsFunc(names, isDiskFile):
		return "", false, &missingError{what: "the storage that the disk is to be made on",
			path: dir}
	}
	return dir, there, nil
}

// diskFor says what to open for a volume.
func (m *Manager) diskFor(r store.Record) (Disk, error) {
	dir, there, err := m.find(r)
	if err == nil && !there && r.File == "" && r.Spec.From != nil && r.Spec.From.Upload {
		err = &missingError{what: "the data that was uploaded", path: filepath.Join(dir, diskName)}
	}
	return Disk{Name: r.Name, LUN: r.LUN, Dir: dir, Size: r.Size, BlockSize: r.Spec.BlockSize,
		Source: r.Spec.From, File: r.File, CopyMode: r.Spec.Copy.Mode,
		AccessMode: r.Spec.AccessMode, UsageType: r.Spec.Copy.UsageType, There: there}, err
}
