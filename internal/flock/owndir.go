package flock

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// OwnDir is a directory that a process has beside those of others. A file in it is locked for as
// long as the process runs, so what a killed one has left can be told from a running one's,
// whatever process has its number now.
type OwnDir struct {
	Path string
	lock *os.File
}

const (
	// ownLock is the name of that file, in a directory whose other names are the owner's.
	ownLock = ".lock"
	// newPrefix begins the name of a directory whose file is not locked yet. Nobody looks for it,
	// so it stays if its process is killed at that moment, without content.
	newPrefix = ".new-"
)

// NewOwnDir makes one in a directory, whose name begins with prefix. It removes those that killed
// processes have left there.
func NewOwnDir(in *os.File, prefix string) (*OwnDir, error) {
	OwnDirs(in, prefix)
	made, err := os.MkdirTemp(in.Name(), newPrefix)
	if err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(made, ownLock), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errors.Join(err, os.Remove(made))
	}
	// Without locks, nobody finds it, and it stays if the process is killed.
	_ = Lock(lock, unix.LOCK_EX|unix.LOCK_NB)
	name := prefix + strings.TrimPrefix(filepath.Base(made), newPrefix)
	d := &OwnDir{filepath.Join(in.Name(), name), lock}
	// Not before it is locked: without, others would take it for that of a killed process.
	if err := os.Rename(made, d.Path); err != nil {
		return nil, errors.Join(err, os.RemoveAll(made), lock.Close())
	}
	return d, nil
}

// Remove removes the directory with everything in it. d may be nil.
func (d *OwnDir) Remove() error {
	if d == nil {
		return nil
	}
	return errors.Join(os.RemoveAll(d.Path), d.lock.Close())
}

// OwnDirs returns the paths of running processes' directories, and removes those that killed ones
// have left.
func OwnDirs(in *os.File, prefix string) (running []string) {
	entries, _ := os.ReadDir(in.Name()) // if it cannot be read, nothing is found
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		path := filepath.Join(in.Name(), e.Name())
		lock, err := os.OpenFile(filepath.Join(path, ownLock), os.O_RDWR|unix.O_NOFOLLOW, 0)
		if err == nil {
			err = Lock(lock, unix.LOCK_EX|unix.LOCK_NB)
		}
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			running = append(running, path)
		case err == nil, errors.Is(err, fs.ErrNotExist):
			_ = os.RemoveAll(path) // the next one tries again
		}
		if lock != nil {
			_ = lock.Close()
		}
	}
	return running
}
