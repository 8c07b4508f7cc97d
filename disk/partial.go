package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// partialSuffix marks a file that is still being written.
const partialSuffix = ".partial"

// partial is a file on its way to its final name.
type partial struct {
	file *os.File
	path string // the final one
}

// createPartial begins a file that is to be path. One that a killed process left behind is taken over and emptied; one
// that is being written at the moment is a *LockedError.
func createPartial(path string, mode fs.FileMode) (*partial, error) {
	name := path + partialSuffix
	for range 16 {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, mode)
		if err != nil {
			return nil, err
		}
		current, err := claimPartial(f, name)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if current {
			return &partial{file: f, path: path}, nil
		}
		f.Close() // the other process finished it in between, so this is its result by now
	}
	return nil, &LockedError{Path: name, Holder: "another process"}
}

// claimPartial locks and empties a partial file, unless it no longer has that name.
func claimPartial(f *os.File, name string) (current bool, err error) {
	if err := lockFile(f); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, &LockedError{Path: name, Holder: "another process that writes it"}
		}
		return false, &os.PathError{Op: "flock", Path: name, Err: err}
	}
	if current, err := hasName(f, name); err != nil || !current {
		return false, err
	}
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !mine.Mode().IsRegular() {
		return false, fmt.Errorf("%q is in the way and no regular file; remove it", name)
	}
	if mine.Size() == 0 {
		// ext4 takes a file that was truncated for one that is being replaced, and starts to write it out when it is closed.
		return true, nil
	}
	return true, f.Truncate(0)
}

// finish gives the file its final name if what was done so far succeeded; otherwise it removes the file.
func (p *partial) finish(err error) error {
	name := p.path + partialSuffix
	if err == nil {
		if err = os.Rename(name, p.path); err == nil {
			return p.file.Close()
		}
	}
	return errors.Join(err, os.Remove(name), p.file.Close())
}
