package instance

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
)

// PersistentDirs returns the directory of each image's disk on a volume: the volume itself for a
// single image, because a file-system volume holds one disk, and otherwise a directory for each. An
// error is a *PersistentError or comes from the file system. The volume must exist: if its name is
// wrong or nothing is mounted, a new directory would be lost with the container, and the data with
// it.
func PersistentDirs(volume string, images []string) ([]string, error) {
	switch st, err := os.Stat(volume); {
	case err != nil:
		return nil, err
	case !st.IsDir():
		return nil, &fs.PathError{Op: "stat", Path: volume, Err: unix.ENOTDIR}
	}
	volume, err := osfile.Resolved(volume) // links below it are not followed
	if err != nil {
		return nil, err
	}
	alone := filepath.Join(volume, PersistentName)
	single, err := persistentDirOf(volume).begun()
	if err != nil {
		return nil, err
	}
	dirs := make([]string, len(images))
	for i, name := range images {
		dirs[i] = filepath.Join(volume, escapeName(name))
	}
	if len(images) > 1 {
		if single {
			own := dirs[0] + " for the first one"
			if s, err := loadState(persistentDirOf(volume).state()); err == nil {
				own = filepath.Join(volume, escapeName(s.Image))
			}
			return nil, &PersistentError{Path: alone,
				Reason: "is the disk of a volume for one image, and there are several now",
				Action: "give the images volumes of their own, or move " + PersistentName +
					"* into the directory of its image, " + own}
		}
		return dirs, nil
	}
	several, err := persistentDirOf(dirs[0]).begun()
	switch {
	case err != nil:
		return nil, err
	case single && several:
		return nil, &PersistentError{Path: alone,
			Reason: "exists, and so does " + filepath.Join(dirs[0], PersistentName) +
				": it is not clear which one to use",
			Action: "move one of them away"}
	case several:
		return dirs, nil // there were several images before
	}
	return []string{volume}, nil
}

// begun reports whether there is a disk, or a part of one.
func (d *diskDir) begun() (bool, error) {
	if there, err := present(d.disk()); err != nil || there {
		return there, err
	}
	st, err := os.Stat(d.path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	if err != nil || !st.IsDir() { // a directory may have the name of an image
		return false, err
	}
	return d.remains()
}

// HasPersistent reports whether a volume has a disk, or a part of one.
func HasPersistent(volume string) bool {
	if real, err := osfile.Resolved(volume); err == nil {
		volume = real // a state is not read through links
	}
	there, err := persistentDirOf(volume).begun()
	return err != nil || there
}

// Kept is a persistent disk of an earlier start.
type Kept struct {
	Dir      string // its directory, for Options.PersistentDir
	Name     string // of its image, or of its directory if that is not known
	Complete bool   // it needs no image any more
	// Needs are the image.Contents of the image that the disk was made of. nil: unknown.
	Needs []string
}

// KeptIn finds the disks on a volume, in the places that PersistentDirs gives them. It changes
// nothing.
func KeptIn(volume string) (all []Kept, err error) {
	volume, err = osfile.Resolved(volume)
	if err != nil {
		return nil, err
	}
	dirs := []string{volume}
	if !HasPersistent(volume) {
		if dirs, err = subdirectories(volume); err != nil {
			return nil, err
		}
	}
	for _, dir := range dirs {
		if !HasPersistent(dir) {
			continue
		}
		one := Kept{Dir: dir, Name: filepath.Base(dir), Complete: true}
		// A state that cannot be read is reported when the disk is opened.
		if s, err := loadState(persistentDirOf(dir).state()); err == nil {
			one.Name, one.Complete, one.Needs = s.Image, s.Complete, image.Contents(s.Chain)
		}
		all = append(all, one)
	}
	return all, nil
}

// subdirectories are the directories of disks. Names that begin with a dot are left out:
// disk/transfer gives such a name to a disk that is received in part.
func subdirectories(dir string) (all []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() && e.Name()[0] != '.' {
			all = append(all, filepath.Join(dir, e.Name()))
		}
	}
	return all, err
}

// Exists reports whether an earlier start has made a disk: in a persistent directory, or without
// one in the work directory, under the name of its image. If that cannot be found out, it returns
// true, and opening the disk says why.
func Exists(persistentDir, workDir, name string) bool {
	d := persistentDirOf(persistentDir)
	if persistentDir == "" {
		d = workDirOf(workDir, escapeName(name))
	}
	there, err := present(d.disk())
	return there || err != nil
}

// present reports whether the name exists and is not a directory. A directory may have the name of
// an image.
func present(path string) (bool, error) {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	return err == nil && !st.IsDir(), err
}
