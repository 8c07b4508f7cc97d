package instance

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/osfile"
)

// PersistentDirs says which directory of a volume holds the disk of each image: the volume itself
// for a single one, as a file-system volume holds one disk, and otherwise a directory for each. An
// error is a *PersistentError, or one of the file system. The volume itself must be there: a
// directory that was made in its place, because its name is a slip or nothing is mounted, would die
// with the container, and what is written with it.
func PersistentDirs(volume string, images []string) ([]string, error) {
	switch st, err := os.Stat(volume); {
	case err != nil:
		return nil, err
	case !st.IsDir():
		return nil, &fs.PathError{Op: "stat", Path: volume, Err: unix.ENOTDIR}
	}
	volume, err := osfile.Resolved(volume) // below it no link is followed
	if err != nil {
		return nil, err
	}
	alone := filepath.Join(volume, PersistentName)
	single, err := present(alone)
	if err != nil {
		return nil, err
	}
	dirs := make([]string, len(images))
	for i, name := range images {
		dirs[i] = filepath.Join(volume, escapeName(name))
	}
	if len(images) > 1 {
		if single {
			return nil, &PersistentError{Path: alone,
				Reason: "is the disk of a volume for one image, and there are several now",
				Action: "give the images volumes of their own, or move " + PersistentName +
					"* into the directory of its image, " + dirs[0] + " for the first one"}
		}
		return dirs, nil
	}
	several, err := present(filepath.Join(dirs[0], PersistentName))
	switch {
	case err != nil:
		return nil, err
	case single && several:
		return nil, &PersistentError{Path: alone,
			Reason: "is there, and so is " + filepath.Join(dirs[0], PersistentName) +
				": it is not clear which one is meant",
			Action: "move one of them away"}
	case several:
		return dirs, nil // there were several images before
	}
	return []string{volume}, nil
}

// HasPersistent reports whether a volume holds a disk that can be served without an image.
func HasPersistent(volume string) bool {
	there, err := present(filepath.Join(volume, PersistentName))
	return err == nil && there
}

// present reports whether there is something of that name other than a directory, which an image
// may give its name to.
func present(path string) (bool, error) {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	return err == nil && !st.IsDir(), err
}
