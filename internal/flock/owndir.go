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

// ownLock is the name of that file, in a directory whose other names are the owner's.
const ownLock = ".lock"

// NewOwnDir makes one in a directory, whose name begins with prefix. It removes those that killed
// processes have left there.
func NewOwnDir(in *os.File, prefix string) (*OwnDir, error) {
	OwnDirs(in, prefix) // it waits: until the lock is there, the new one looks like a killed one's
	path, err := os.MkdirTemp(in.Name(), prefix)
	if err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(path, ownLock), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	// Without locks, nobody finds it, and it stays if the process is killed.
	_ = Lock(lock, unix.LOCK_EX|unix.LOCK_NB)
	return &OwnDir{path, lock}, nil
}

// Remove removes the directory with everything in it. d may be nil.
func (d *OwnDir) Remove() error {
	if d == nil {
		return nil
	}
	return errors.Join(os.RemoveAll(d.Path), d.lock.Close())
}

// OwnDirs returns the paths of running processes' directories, and removes those that killed ones
// have left. in is locked until it is closed.
func OwnDirs(in *os.File, prefix string) (running []string) {
	WaitBriefly(in)
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
