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

// Partial is a file on its way to its final name. Closing it releases its lock.
type Partial struct {
	File *os.File
	path string // its final name

	named  bool     // see CreateNamed
	former *os.File // the file with that name now, locked; nil: there is none
	synced bool     // the content reaches storage, and then the name
}

// Create begins a file that will get the name path. It removes a partial file of a killed process,
// which may be a link or belong to another user. If another process is writing one now, Create
// returns a *LockedError.
func Create(path string, mode fs.FileMode) (*Partial, error) {
	return create(path, mode, unix.LOCK_EX|unix.LOCK_NB)
}

// CreateInTurn is Create, but waits while another process is writing the file.
func CreateInTurn(path string, mode fs.FileMode) (*Partial, error) {
	return create(path, mode, unix.LOCK_EX)
}

// CreateNew is CreateInTurn for a file that replaces none. Directories of its path may be links.
func CreateNew(path string, mode fs.FileMode) (*Partial, error) {
	path, err := osfile.ResolvedFile(path)
	if err != nil {
		return nil, err
	}
	p, err := CreateInTurn(path, mode)
	if err == nil {
		p.named = true
	}
	return p, err
}

// CreateNamed is Create for a path that a person has named. The file that has the name now is
// locked until the new one replaces it: if another process uses it, CreateNamed returns a
// *LockedError. A file that gets the name meanwhile is not replaced. What replaces a file is on
// storage when Finish returns. may says why the former file must not be replaced; nil: any file may
// be.
func CreateNamed(path string, mode fs.FileMode, may func(former *os.File) error) (*Partial, error) {
	former, err := OpenToLock(path)
	switch {
	case err == nil:
		if err = HoldReplaced(former, path); err == nil && may != nil {
			err = may(former)
		}
		if err != nil {
			return nil, errors.Join(err, former.Close())
		}
	case errors.Is(err, fs.ErrNotExist):
	case errors.Is(err, fs.ErrPermission) && may == nil: // it cannot be locked
		p, err := Create(path, mode)
		if err == nil {
			p.synced = true
		}
		return p, err
	default:
		return nil, err
	}
	p, err := Create(path, mode)
	if err != nil {
		return nil, errors.Join(err, closed(former))
	}
	// Otherwise a power cut may leave neither the former content nor the new one: some file systems
	// bring the name to storage first.
	p.named, p.former, p.synced = true, former, former != nil
	return p, nil
}

func closed(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

func create(path string, mode fs.FileMode, how int) (*Partial, error) {
	name := path + PartialSuffix
	var gone error
	for tries := 0; tries < 16; tries++ {
		f, err := osfile.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
		created := err == nil
		if errors.Is(err, fs.ErrExist) {
			f, err = OpenToLock(name)
		}
		if errors.Is(err, unix.ELOOP) && osfile.Remove(name) == nil {
			continue // it was a link, which nobody writes
		}
		if gone = nil; errors.Is(err, fs.ErrNotExist) {
			gone = err // it was removed in between, or there is no such directory
			continue
		}
		if err != nil {
			return nil, err
		}
		if how == unix.LOCK_EX { // a waiting process gets its turn, even if many others were faster
			tries = 0
		}
		current, err := claimPartial(f, name, how)
		if err == nil && current && !created {
			err = osfile.Remove(name)
		}
		switch {
		case err != nil:
			return nil, errors.Join(err, f.Close())
		case current && created:
			return &Partial{File: f, path: path}, nil
		}
		// Another process has finished it in between, or it is a killed process's and was removed
		// now.
		f.Close()
	}
	if gone != nil {
		return nil, gone
	}
	return nil, &LockedError{Path: name, Holder: "another process"}
}

// OpenToLock opens an existing file, for writing if possible: NFS gives an exclusive lock only
// then.
func OpenToLock(path string) (*os.File, error) {
	if f, err := osfile.OpenFile(path, os.O_RDWR, 0); err == nil {
		return f, nil
	}
	return osfile.OpenFile(path, os.O_RDONLY, 0)
}

// claimPartial locks a partial file and reports whether it still has its name.
func claimPartial(f *os.File, name string, how int) (current bool, err error) {
	err = flock.Lock(f, how)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, &LockedError{Path: name, Holder: "another process that writes it"}
	}
	if err != nil {
		return false, err
	}
	if current, err := flock.HasName(f, name); err != nil || !current {
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

// Finish gives the file its final name if err is nil, and closes it. Otherwise it removes the file.
func (p *Partial) Finish(err error) error {
	name := p.path + PartialSuffix
	if err == nil && p.synced {
		err = osfile.Retry(p.File.Sync)
	}
	if err == nil {
		err = p.rename(name)
	}
	if err = errors.Join(err, closed(p.former)); err != nil {
		return errors.Join(err, osfile.Remove(name), p.File.Close())
	}
	if p.synced {
		err = SyncParent(p.path)
	}
	return errors.Join(err, p.File.Close())
}

func (p *Partial) rename(from string) error {
	if p.named && p.former == nil {
		return RenameNew(from, p.path)
	}
	if p.former != nil {
		if there, err := flock.HasName(p.former, p.path); err != nil || !there {
			return errors.Join(err, &takenError{p.path})
		}
	}
	return osfile.Rename(from, p.path, 0)
}

type takenError struct{ path string }

func (e *takenError) Error() string {
	return fmt.Sprintf("somebody else has made or removed %q meanwhile, so it was not written: "+
		"try again, or name another file", e.path)
}

func (e *takenError) Unwrap() error { return fs.ErrExist }

// RenameNew renames a file within its directory, and replaces nothing: if the name exists, the
// error is fs.ErrExist.
func RenameNew(from, to string) error {
	err := osfile.Rename(from, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, fs.ErrExist) {
		return &takenError{to}
	}
	return err
}

// FinishSynced is Finish for a file whose content must not be lost: when it returns nil, first the
// content and then the name have reached storage. Until then the file is locked.
func (p *Partial) FinishSynced(err error) error {
	p.synced = true
	return p.Finish(err)
}

// Write replaces a file of any size by the output of write, in one step and in turn with other
// processes. When it returns nil, content and name have reached storage. The file has exactly this
// mode, whatever the process's umask is.
func Write(path string, mode fs.FileMode, write func(*os.File) error) error {
	out, err := CreateInTurn(path, 0o600)
	if err != nil {
		return err
	}
	if err = write(out.File); err == nil {
		err = out.File.Chmod(mode)
	}
	return out.FinishSynced(err)
}
