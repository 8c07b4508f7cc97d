package instance

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

const (
	// maxEscaped limits the length in bytes of a directory name that is made of an image's name.
	// Longer names are shortened.
	maxEscaped = 200

	// PersistentName is the file of a persistent disk, as on a file-system volume.
	PersistentName = "disk.img"

	diskName  = "disk.raw"
	stateName = "state.json"
)

// diskDir is the locked directory of one disk. An ephemeral disk is in <work directory>/<image>, a
// persistent one in a directory of a volume. Their files have different names:
//
//	lock                          names the process that uses the disk
//	disk.raw  disk.img            the disk's own file
//	state.json  disk.img.state    its identity, its image, and whether it is complete without it
//	*.live                        the map of an incomplete disk, as this boot knows it
//	*.map                         the same as far as it has reached storage
//	*.unit-*/                     what the logical unit keeps with the disk's content
//	*.layers                      which snapshots there are, and which layers above the disk's file
//	*.layer-*                     such a layer, with maps of its own
//	*.spare                       space for the next state, and in *.unit-*/ for what the unit keeps
//
// A file with the suffix ".partial" is being written. The next start removes what a killed process
// left.
type diskDir struct {
	root       string // the path as the operator has given it, with links; "": path has none
	path       string
	lock       *os.File
	diskFile   string // names of the files
	stateFile  string
	persistent bool
	killed     bool // its last user did not close it: the lock file still has that process's number

	stateMu sync.Mutex // held while the state of a disk in use is written
	layered bool       // guarded by stateMu: the disk has layers, so its state is a layeredVersion
}

// openWorkDir makes, locks and cleans the directory of an image's ephemeral disk.
func openWorkDir(root, image string, synced bool) (*diskDir, error) {
	if root == "" {
		return nil, errors.New("no work directory is set")
	}
	d := workDirOf(root, escapeName(image))
	d.root = root
	return d, d.open("work directory", durable.LockName, synced)
}

// workDirOf returns a directory in a work directory. It need not exist.
func workDirOf(root, name string) *diskDir {
	return &diskDir{path: filepath.Join(root, name), diskFile: diskName, stateFile: stateName}
}

// openPersistentDir makes, locks and cleans the directory of a persistent disk.
func openPersistentDir(path string) (*diskDir, error) {
	d := persistentDirOf(path)
	return d, d.open("persistent directory", durable.PersistentLockName, true)
}

// persistentDirOf returns the directory of a persistent disk. It need not exist.
func persistentDirOf(path string) *diskDir {
	return &diskDir{path: path, diskFile: PersistentName, persistent: true,
		stateFile: PersistentName + image.StateSuffix}
}

func (d *diskDir) open(what, lock string, synced bool) error {
	explain := func(err error) error {
		switch {
		case errors.Is(err, unix.ELOOP):
			return fmt.Errorf("%s: %w; a symbolic link is not followed there: remove it", what, err)
		case errors.Is(err, osfile.ErrForeign):
			return fmt.Errorf("%s: %w", what, err)
		case errors.Is(err, unix.ENOTDIR):
			return fmt.Errorf("%s: %w; name a directory, which is made if it is missing", what, err)
		case errors.Is(err, unix.EROFS):
			return fmt.Errorf("%s: %w; mount a volume there that user %d can write to", what, err,
				os.Geteuid())
		case errors.Is(err, fs.ErrPermission):
			return fmt.Errorf("%s: %w; user %d must be able to write there", what, err,
				os.Geteuid())
		case disk.IsNoSpace(err):
			return fmt.Errorf("%s: %w; make room or use a larger volume", what, err)
		case errors.Is(err, unix.ENOLCK) || errors.Is(err, errors.ErrUnsupported):
			return fmt.Errorf("%s: %w; its file system must be one that has locks", what, err)
		}
		return fmt.Errorf("%s: %w", what, err)
	}
	err := durable.ErrLockGone
	for tries := 0; tries < 16 &&
		(errors.Is(err, durable.ErrLockGone) || errors.Is(err, fs.ErrNotExist)); tries++ {
		// Until it is locked, another process may remove it.
		if err = d.makeDir(synced); errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return explain(err)
		}
		d.lock, d.killed, err = durable.AcquireDiskLock(filepath.Join(d.path, lock),
			what+" "+d.path)
	}
	if err != nil {
		if errors.As(err, new(*durable.LockedError)) {
			return err
		}
		return explain(err)
	}
	for _, name := range []string{d.disk(), d.state(), d.liveMap(), d.durableMap()} {
		if err := osfile.Remove(name + durable.PartialSuffix); err != nil {
			return errors.Join(err, d.close())
		}
	}
	if !synced {
		return nil
	}
	if err := d.syncNames(); err != nil {
		return errors.Join(explain(err), d.close())
	}
	return nil
}

// syncNames makes the names of files durable, also in units' directories. A killed process may have
// renamed a file without a sync of the directory, and later flushes rely on the name.
func (d *diskDir) syncNames() error {
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), d.diskFile+image.UnitInfix) {
			err = errors.Join(err,
				durable.SyncDir(filepath.Join(d.path, e.Name()), (*os.File).Sync))
		}
	}
	return errors.Join(err, durable.SyncDir(d.path, (*os.File).Sync))
}

// makeDir makes the directory. It refuses an existing one of another user, who could have put
// anything into it. On a volume the owner may be another user.
func (d *diskDir) makeDir(synced bool) error {
	if d.root == "" {
		return durable.MakeDirs(d.path, synced)
	}
	if err := durable.MakeDirs(d.root, synced); err != nil {
		return err
	}
	root, err := osfile.Resolved(d.root)
	if err != nil {
		return err
	}
	d.path = filepath.Join(root, filepath.Base(d.path))
	err = osfile.MakeDir(d.path)
	switch {
	case err == nil && synced:
		return durable.SyncParent(d.path)
	case err == nil:
		return nil
	}
	there := osfile.CheckOwner(d.path)
	if errors.Is(there, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist) {
		return err // the directory cannot be made
	}
	return there
}

func (d *diskDir) disk() string       { return filepath.Join(d.path, d.diskFile) }
func (d *diskDir) state() string      { return filepath.Join(d.path, d.stateFile) }
func (d *diskDir) liveMap() string    { return d.disk() + image.MapSuffixes[0] }
func (d *diskDir) durableMap() string { return d.disk() + image.MapSuffixes[1] }

// clear removes a disk. An ephemeral disk loses its state first: without a state it is not used. A
// persistent disk here has no disk file, and loses its state last: until then the state says that
// there was a disk, and that the rest must be removed.
func (d *diskDir) clear() error {
	state := []string{d.state(), d.state() + durable.SpareSuffix}
	if !d.persistent {
		if err := removeAll(state); err != nil {
			return err
		}
	}
	err := removeAll([]string{d.liveMap(), d.durableMap(), d.disk()})
	if err == nil {
		err = errors.Join(d.clearLayers(nil), d.clearUnits())
	}
	if err != nil || !d.persistent {
		return err
	}
	return removeAll(state)
}

// removeAll removes files in their order. It stops at an error.
func removeAll(names []string) error {
	for _, name := range names {
		if err := osfile.Remove(name); err != nil {
			return err
		}
	}
	return nil
}

// remains reports whether there was a disk whose own file is missing: any other file of a disk
// shows that. Only the state and the maps of a disk that was about to be made are older than its
// file. A power cut may have damaged the state of an ephemeral one.
func (d *diskDir) remains() (bool, error) {
	s, err := loadState(d.state())
	damaged := err != nil && !errors.Is(err, fs.ErrNotExist)
	switch {
	case durable.IsUnread(err):
		return false, err
	case err == nil && s.lost(), damaged && d.persistent:
		return true, nil
	}
	part, err := d.leftover(err == nil || damaged)
	return part != "", err
}

// leftover returns a file of a disk other than its own file and its state. "": there is none.
func (d *diskDir) leftover(withoutMaps bool) (name string, err error) {
	entries, err := os.ReadDir(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	for _, e := range entries {
		end, is := strings.CutPrefix(e.Name(), d.diskFile)
		isMap := end == image.MapSuffixes[0] || end == image.MapSuffixes[1]
		if is && (end == image.LayersSuffix || strings.HasPrefix(end, layerInfix) ||
			strings.HasPrefix(end, image.UnitInfix) || isMap && !withoutMaps) {
			return e.Name(), err
		}
	}
	return "", err
}

func (d *diskDir) removeMaps() error {
	return errors.Join(osfile.Remove(d.liveMap()), osfile.Remove(d.durableMap()))
}

// syncContent makes durable what was written without a sync: the disk, and the files of its unit
// for that content.
func (d *diskDir) syncContent(content string) error {
	if err := syncFile(d.disk()); err != nil {
		return err
	}
	unit := d.disk() + image.UnitInfix + content
	entries, err := os.ReadDir(unit)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, syncFile(filepath.Join(unit, e.Name())))
	}
	return errors.Join(err, durable.SyncDir(unit, (*os.File).Sync), durable.SyncParent(unit))
}

// clearUnits removes the units' files about a disk that is about to be replaced.
func (d *diskDir) clearUnits() error {
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), d.diskFile+image.UnitInfix) {
			err = errors.Join(err, osfile.RemoveAll(filepath.Join(d.path, e.Name())))
		}
	}
	return err
}

// checkPath checks that the path still leads to the directory that was locked. If it leads to
// another, neither has the whole disk.
func (d *diskDir) checkPath() error { return durable.Holds(d.lock, d.lock.Name()) }

func (d *diskDir) close() error { return durable.ReleaseLock(d.lock) }

// escapeName makes a directory name of a file name. The result is unique, needs no quoting, is not
// hidden and fits every file system.
func escapeName(name string) string {
	var b strings.Builder
	for i := range len(name) {
		c := name[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
			c == '-' || c == '_' || c == '.' && i > 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	if b.Len() <= maxEscaped {
		return b.String()
	}
	return fmt.Sprintf("%s%%~%016x", b.String()[:maxEscaped-18], xxhash.Sum64String(name))
}
