package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
)

// PartialSuffix marks a file that is still being written.
const PartialSuffix = ".partial"

// partial is a file on its way to its final name.
type partial struct {
	File *os.File
	path string // its final name
}

// Create begins a file that will get the name path. It removes a partial file that a killed process
// left behind, which may be a link or belong to another user. If another process is writing one
// now, Create returns a *LockedError.
func Create(path string, mode fs.FileMode) (*partial, error) {
	name := path + PartialSuffix
	for range 16 {
		f, err := osfile.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
		created := err == nil
		if errors.Is(err, fs.ErrExist) {
			f, err = osfile.OpenFile(name, os.O_RDONLY, 0)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue // somebody removed it in between
		}
		if err != nil {
			return nil, err
		}
		current, err := claimPartial(f, name)
		if err == nil && current && !created {
			err = osfile.Remove(name)
		}
		switch {
		case err != nil:
			return nil, errors.Join(err, f.Close())
		case current && created:
			return &partial{File: f, path: path}, nil
		}
		// Another process finished it in between, or it was left behind and is removed now.
		f.Close()
	}
	return nil, &LockedError{Path: name, Holder: "another process"}
}

// claimPartial locks a partial file and reports whether it still has its name.
func claimPartial(f *os.File, name string) (current bool, err error) {
	err = flock.Lock(f, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, &LockedError{Path: name, Holder: "another process that writes it"}
	}
	if err != nil {
		return false, err
	}
	if current, err := HasName(f, name); err != nil || !current {
		return false, err
	}
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !mine.Mode().IsRegular() {
		return false, fmt.Errorf("%q is in the way and is not a regular file; remove it", name)
	}
	return true, nil
}

// Finish gives the file its final name if err is nil. Otherwise it removes the file.
func (p *partial) Finish(err error) error {
	name := p.path + PartialSuffix
	if err == nil {
		if err = osfile.Rename(name, p.path, 0); err == nil {
			return p.File.Close()
		}
	}
	return errors.Join(err, osfile.Remove(name), p.File.Close())
}
