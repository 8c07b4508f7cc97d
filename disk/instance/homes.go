package instance

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// homesName is the directory for the records of disks outside of the base. The name of a disk's
// directory never begins with a dot.
const homesName = ".homes"

// storageName is a file with a random text. It tells a storage that has disks from an empty mount
// point.
const storageName = ".storage-id"

// Homes are the directories that may have the disks of one daemon. A setting may choose another
// home for a disk at every start, but the data does not move. Settle notices that.
type Homes struct {
	// Base is the work directory, or the volume of persistent disks. It keeps the records of disks
	// elsewhere, and may be missing.
	Base       string
	Roots      []string // other directories that may hold disks; they exist
	Owner      string   // of ephemeral disks, as in Options
	Persistent bool
	Durable    bool // ephemeral disks survive a restart of the machine
	// Kept says that a guest's writes are kept, whatever happens to the storage of a disk.
	Kept bool
}

// DirIn returns the directory of a disk in a directory for the disks of many images.
func DirIn(root, name string) string { return filepath.Join(root, escapeName(name)) }

// home is the record of a disk that is outside of the base.
type home struct {
	Dir   string `json:"dir"`
	Owner string `json:"owner,omitempty"` // of an ephemeral disk
	// Storage is the text in that directory's file storageName. "": unknown.
	Storage string `json:"storage,omitempty"`
	// Boot is the boot of the kernel in which the disk exists. "": it survives every boot.
	Boot string `json:"boot,omitempty"`
}

// OtherPlaceError says that a disk is in another directory than the one that it should be made in.
// Nothing has changed.
type OtherPlaceError struct {
	Name  string // of the disk
	There string // where the disk is
	Here  string // where it should be made
	Away  bool   // that directory does not exist or is empty, as before a volume is mounted
}

func (e *OtherPlaceError) Error() string {
	if e.Away {
		return fmt.Sprintf("the disk of %s lies in %q, which does not exist now, and would be "+
			"made again in %q; mount its storage, or remove what is known of it in %q",
			words.Name(e.Name), e.There, e.Here, homesName)
	}
	return fmt.Sprintf("the disk of %s lies in %q, and would be made again in %q without what was "+
		"written to it; keep it where it lies, or remove that directory to begin anew",
		words.Name(e.Name), e.There, e.Here)
}

// Settle checks whether dir can be the home of a disk. usual is its home if none is chosen. Both
// are directories of this disk alone. The error is an *OtherPlaceError if the disk is in another
// directory, or if it is in dir and the storage of dir is missing. Settle writes nothing. When the
// disk is made, call Made.
func (h Homes) Settle(name, usual, dir string) error {
	if err := knowBoot(); err != nil {
		return err
	}
	known, err := h.recall(name)
	if err != nil {
		return err
	}
	places := []string{usual}
	if !h.Persistent { // a persistent disk has no owner, so it could be another daemon's
		for _, root := range append([]string{h.Base}, h.Roots...) {
			places = append(places, DirIn(root, name))
		}
	}
	if known != nil && (h.Persistent || known.Owner == h.Owner) {
		places = append(places, known.Dir)
		if away, err := h.away(name, known); err != nil {
			return err
		} else if away {
			return &OtherPlaceError{Name: name, There: known.Dir, Here: dir, Away: true}
		}
	}
	for _, place := range places {
		if samePlace(place, dir) {
			continue
		}
		there, err := h.holds(place, name)
		if err != nil {
			return err
		}
		if there {
			return &OtherPlaceError{Name: name, There: place, Here: dir}
		}
	}
	return nil
}

// Made records the home of a disk that was made, before a guest can use it.
func (h Homes) Made(name, usual, dir string) error {
	known, err := h.recall(name)
	if err != nil {
		return err
	}
	if samePlace(usual, dir) {
		return h.forget(name, known)
	}
	now := home{Dir: dir, Owner: h.Owner}
	if !h.Persistent && !h.Durable {
		now.Boot = bootID()
	}
	if h.Kept {
		if now.Storage, err = storageID(filepath.Dir(dir)); err != nil {
			return fmt.Errorf("the storage of the disk of %s: %w", words.Name(name), err)
		}
	}
	return h.remember(name, now, known)
}

// away reports whether the storage of a disk is missing: the directory of the storage does not
// exist, or is an empty mount point. It is not missing if only the disk's own directory was
// removed.
func (h Homes) away(name string, known *home) (bool, error) {
	if known.Boot != "" && known.Boot != bootID() {
		return false, nil // the disk is lost in any case
	}
	if there, err := h.holds(known.Dir, name); err != nil || there {
		return false, err
	}
	root, err := osfile.Resolved(filepath.Dir(known.Dir))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil || known.Storage == "" {
		return false, err
	}
	path := filepath.Join(root, storageName)
	switch id, err := durable.Read(path); {
	case err == nil:
		return string(id) != known.Storage, nil
	case errors.Is(err, fs.ErrNotExist):
		return true, nil
	default:
		return false, fmt.Errorf("%q %w", path, err)
	}
}

// storageID returns the text that identifies a storage. If there is none, it writes one.
func storageID(root string) (string, error) {
	root, err := osfile.Resolved(root)
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, storageName)
	read := func() (string, error) {
		id, err := durable.Read(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%q %w", path, err)
		}
		return string(id), err
	}
	id, err := read()
	if !errors.Is(err, fs.ErrNotExist) {
		return id, err
	}
	out, err := durable.CreateNew(path, 0o600)
	if err != nil {
		return "", err
	}
	id = rand.Text()
	if _, err = out.File.WriteString(id); err == nil {
		err = out.File.Chmod(0o644) // daemons of other users read it
	}
	if err = out.FinishSynced(err); errors.Is(err, fs.ErrExist) {
		return read() // another daemon was faster
	}
	return id, err
}

// samePlace reports whether two paths lead to the same directory, which need not exist.
func samePlace(a, b string) bool {
	if filepath.Clean(a) == filepath.Clean(b) {
		return true
	}
	rootA, errA := osfile.Resolved(filepath.Dir(a))
	rootB, errB := osfile.Resolved(filepath.Dir(b))
	return errA == nil && errB == nil &&
		filepath.Join(rootA, filepath.Base(a)) == filepath.Join(rootB, filepath.Base(b))
}

// holds reports whether a directory has the disk, with data that a new disk would lack.
func (h Homes) holds(path, name string) (bool, error) {
	root, err := osfile.Resolved(filepath.Dir(path)) // a state is not read through links
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err // the disk may be there
	}
	if h.Persistent {
		return persistentDirOf(filepath.Join(root, filepath.Base(path))).begun()
	}
	d := workDirOf(root, filepath.Base(path))
	if there, err := present(d.disk()); err != nil || !there {
		return false, err
	}
	s, err := loadState(d.state())
	if durable.IsUnread(err) {
		return false, fmt.Errorf("the disk %q: %w", d.disk(), err)
	}
	// Without an intact state, the disk would not be kept there either.
	return err == nil && s.Mode != CopyNone && s.Owner == h.Owner && s.Image == storedName(name) &&
		s.survivesBoot(bootID()), nil
}

// file returns the file with the record of a disk's home, or "" without a base.
func (h Homes) file(name string) (string, error) {
	base, err := osfile.Resolved(h.Base)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return filepath.Join(base, homesName, escapeName(name)), err
}

// recall returns the record of a disk's home, or nil.
func (h Homes) recall(name string) (*home, error) {
	path, err := h.file(name)
	if err != nil || path == "" {
		return nil, err
	}
	text, err := durable.Read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("what is known of the place of the disk of %s: %q %w",
			words.Name(name), path, err)
	}
	known := new(home)
	if err := json.Unmarshal(text, known); err != nil || !filepath.IsAbs(known.Dir) {
		return nil, fmt.Errorf("what is known of the place of the disk of %s is damaged: see "+
			"whether it lies where it should, and remove %q", words.Name(name), path)
	}
	return known, nil
}

// remember stores the record of a disk's home. It is on storage even if the disk is never flushed:
// half of a record would end every start after a power cut.
func (h Homes) remember(name string, now home, known *home) error {
	if known != nil && *known == now {
		return nil
	}
	if err := durable.MakeDirs(h.Base, true); err != nil {
		return err
	}
	path, err := h.file(name)
	if err != nil {
		return err
	}
	if err := osfile.MakeDir(filepath.Dir(path)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	text, err := json.Marshal(now)
	if err != nil {
		return err
	}
	spare := path + durable.SpareSuffix
	if err := durable.Replace(nil, path, append(text, '\n'), spare, (*os.File).Sync); err != nil {
		return err
	}
	return durable.SyncParent(filepath.Dir(path))
}

// forget removes the record of a disk that is in the base again.
func (h Homes) forget(name string, known *home) error {
	if known == nil || !h.Persistent && known.Owner != h.Owner {
		return nil
	}
	path, err := h.file(name)
	if err != nil || path == "" {
		return err
	}
	return errors.Join(osfile.Remove(path), osfile.Remove(path+durable.SpareSuffix))
}
