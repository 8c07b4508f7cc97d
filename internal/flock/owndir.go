package flock

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// OwnDir is a directory of one process among those of others. A file in it is locked for as long as
// the process runs. So the directory of a killed process can be told from a running one's, even if
// another process has its number now.
type OwnDir struct {
	Path string
	lock *os.File
}

// ownLock is the name of that file. The other names in the directory are the owner's.
const ownLock = ".lock"

// TemporaryDir makes an OwnDir in the directory for temporary files, which other users may share.
func TemporaryDir() (*OwnDir, error) {
	return NewOwnDir(os.TempDir(), "kubevirt-disk-tmp-")
}

// NewOwnDir makes an OwnDir in a directory. Its name begins with prefix. NewOwnDir removes those of
// killed processes there.
func NewOwnDir(in, prefix string) (*OwnDir, error) {
	OwnDirs(in, prefix)
	// A directory of this name, whose file is not locked yet, is not searched. It stays, empty, if
	// its process is killed at that moment.
	made, err := os.MkdirTemp(in, "."+prefix)
	if err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(made, ownLock), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errors.Join(err, os.Remove(made))
	}
	// Without locks, nobody finds it, and it stays if the process is killed.
	_ = Lock(lock, unix.LOCK_EX|unix.LOCK_NB)
	name := strings.TrimPrefix(filepath.Base(made), ".")
	d := &OwnDir{filepath.Join(in, name), lock}
	// Only now that it is locked: others would take it for that of a killed process.
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

// OwnDirs returns the paths of running processes' directories, and removes those of killed ones.
func OwnDirs(in, prefix string) (running []string) {
	entries, _ := os.ReadDir(in) // if it cannot be read, nothing is found
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		path := filepath.Join(in, e.Name())
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || int(st.Uid) != os.Geteuid() {
			continue // another user's: root could remove it
		}
		lock, err := os.OpenFile(filepath.Join(path, ownLock), os.O_RDWR|unix.O_NOFOLLOW, 0)
		if err == nil {
			err = Lock(lock, unix.LOCK_EX|unix.LOCK_NB)
		}
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			running = append(running, path)
		case err == nil, errors.Is(err, fs.ErrNotExist):
			_ = os.RemoveAll(path) // the next call tries again
		}
		if lock != nil {
			_ = lock.Close()
		}
	}
	return running
}
