package volume

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// diskName is the prefix of all files of a disk.
const diskName = "disk.img"

func now() time.Time { return time.Now().UTC().Truncate(time.Second) }

func join(errs ...error) error { return errors.Join(errs...) }

// place is the place of a new volume's disk.
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
	if err == nil && r.Place.Kind == store.PlaceUsageType {
		// Other servers may keep volumes in it, too.
		dir = filepath.Join(dir, ".volumes", m.store.ID(), r.Name)
	}
	return dir, err
}

// makePlace makes the directory of a volume on another storage, whose own directory exists.
func makePlace(dir string) error {
	above := filepath.Dir(dir)
	if err := os.MkdirAll(above, 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for _, name := range []string{above, filepath.Dir(above), filepath.Dir(filepath.Dir(above))} {
		if err := syncDir(name); err != nil {
			return err
		}
	}
	return nil
}

func syncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// vacant refuses a directory that has a disk. The disk is another volume's, or came from elsewhere,
// and must not be deleted with this volume.
func (m *Manager) vacant(r store.Record, dir string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.volumes {
		if o.name != r.Name && o.record.State != "" && o.record.Place == r.Place {
			return api.Errorf(api.CodeInUse, "the volume %q already uses the claim %q", o.name,
				r.Place.Name)
		}
	}
	names, err := diskFiles(dir)
	if err != nil {
		return failed("the directory of the volume %q cannot be read: %w", r.Name, err)
	}
	if len(names) > 0 {
		return api.Errorf(api.CodeInUse, "%q has a disk already: remove %s* there, or use another "+
			"claim", dir, diskName)
	}
	return nil
}

// diskFiles returns the paths of the disk's files in a directory.
func diskFiles(dir string) (paths []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), diskName) {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, err
}

// clear removes the disk of a volume and everything else except its record.
func (m *Manager) clear(r store.Record) error {
	dir, err := m.dir(r)
	if err != nil {
		return fmt.Errorf("its disk is kept: %w", err)
	}
	switch r.Place.Kind {
	case store.PlaceOwn:
		return nil // it goes with the record
	case store.PlaceUsageType:
		return os.RemoveAll(dir)
	}
	if err := clearDisk(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// clearDisk removes the files of the disk in a directory.
func clearDisk(dir string) error {
	paths, err := diskFiles(dir)
	for _, path := range paths {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil {
		return err
	}
	return syncDir(dir)
}
