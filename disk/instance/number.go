package instance

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// lun returns the number for the state of a disk.
func (o *opening) lun(s *state) uint16 {
	if o.opt.LUN == 0 {
		return s.LUN
	}
	return o.opt.LUN
}

// KnownAs returns the number that the disk in a directory was served as last, and its identity.
// Zeros: there is no disk, or it does not know. An error says that the disk may know, and cannot be
// read now.
func KnownAs(dir string, persistent bool) (lun uint16, id disk.Identity, err error) {
	s, err := stateIn(dir, persistent)
	if s == nil {
		return 0, disk.Identity{}, err
	}
	return s.LUN, s.Identity, nil
}

// LUNs returns the numbers of the disks in a directory that holds the disks of many images, by
// the names of their directories. Of ephemeral disks only the owner's count.
func LUNs(root, owner string, persistent bool) (map[string]uint16, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	all := map[string]uint16{}
	for _, e := range entries {
		if !e.IsDir() || e.Name()[0] == '.' {
			continue
		}
		// The disk of an image that is here is read for itself, and its errors count there.
		s, _ := stateIn(filepath.Join(root, e.Name()), persistent)
		if s != nil && s.LUN != 0 && (persistent || s.Owner == owner) {
			all[e.Name()] = s.LUN
		}
	}
	return all, err
}

// stateIn returns the state of the disk in a directory, or nil.
func stateIn(dir string, persistent bool) (*state, error) {
	root, err := osfile.Resolved(filepath.Dir(dir))
	if err != nil {
		return nil, nil // there is nothing
	}
	d := workDirOf(root, filepath.Base(dir))
	if persistent {
		d = persistentDirOf(d.path)
	}
	s, err := d.known()
	if durable.IsUnread(err) {
		return nil, fmt.Errorf("the disk %q cannot be used now and is left as it is: %w", d.disk(),
			err)
	}
	if err != nil {
		return nil, nil // opening the disk says what is wrong
	}
	return s, nil
}
