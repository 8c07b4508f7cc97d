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

// createPartial begins a file that is to be path. One that a killed process left behind is removed, as it may be a link to another
// file, or of another user; one that is being written at the moment is a *LockedError.
func createPartial(path string, mode fs.FileMode) (*partial, error) {
	name := path + partialSuffix
	for range 16 {
		f, err := openFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
		created := err == nil
		if errors.Is(err, fs.ErrExist) {
			f, err = openFile(name, os.O_RDONLY, 0)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was there a moment ago
		}
		if err != nil {
			return nil, err
		}
		current, err := claimPartial(f, name)
		if err == nil && current && !created {
			err = remove(name)
		}
		switch {
		case err != nil:
			return nil, errors.Join(err, f.Close())
		case current && created:
			return &partial{file: f, path: path}, nil
		}
		f.Close() // the other process finished it in between, so this is its result by now; or it was left behind
	}
	return nil, &LockedError{Path: name, Holder: "another process"}
}

// claimPartial locks a partial file, unless it no longer has that name.
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
	return true, nil
}

// finish gives the file its final name if what was done so far succeeded; otherwise it removes the file.
func (p *partial) finish(err error) error {
	name := p.path + partialSuffix
	if err == nil {
		if err = rename(name, p.path, 0); err == nil {
			return p.file.Close()
		}
	}
	return errors.Join(err, remove(name), p.file.Close())
}
