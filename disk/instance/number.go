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

// lun returns the LUN number for the state of a disk.
func (o *opening) lun(s *state) uint16 {
	if o.opt.LUN == 0 {
		return s.LUN
	}
	return o.opt.LUN
}

// KnownAs returns the LUN number that the disk in a directory had last, and its identity. Both are
// zero if there is no disk, or if its state has none. After an error, the disk may have them, and
// its state cannot be read now.
func KnownAs(dir string, persistent bool) (lun uint16, id disk.Identity, err error) {
	s, err := stateIn(dir, persistent)
	if s == nil {
		return 0, disk.Identity{}, err
	}
	return s.LUN, s.Identity, nil
}

// LUNs returns the LUN numbers of the disks in a directory for the disks of many images, by the
// names of their directories. Ephemeral disks of another owner are left out.
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
		// A disk whose image is here is opened later, and its errors are reported then.
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
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // there is no disk
	}
	if err != nil {
		return nil, err
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
