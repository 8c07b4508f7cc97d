package adapter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
)

// Kept is a level in a directory, with what belongs to it, or what is left of making one.
type Kept struct {
	Path  string // of the level
	Bytes int64  // on storage, all in all
	Used  time.Time
	files []string
}

// ErrInUse says that a level is kept because somebody uses it.
var ErrInUse = errors.New("the level is in use")

// IsLevel tells whether a file in a directory of Build has the name of a level. Such a name says
// what the file contains.
func IsLevel(name string) bool {
	stem, ok := strings.CutSuffix(name, suffix)
	return ok && (stem == "empty" || strings.HasPrefix(stem, "layer-") ||
		strings.HasPrefix(stem, "image-"))
}

// List returns what Build has made in a directory. Whoever uses a level holds a shared lock on its
// file (flock), and it counts as used now. A directory that is missing has nothing.
func List(dir string) ([]Kept, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []Kept
	index := make(map[string]int)
	for _, e := range entries {
		name := e.Name()
		level := name
		if stem, ok := strings.CutSuffix(name, stateSuffix); ok {
			level = stem + ".qcow2"
		}
		if !IsLevel(level) && !(strings.HasPrefix(name, ".") &&
			strings.HasSuffix(name, partialSuffix)) {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || !info.Mode().IsRegular() {
			continue
		}
		i, there := index[level]
		if !there {
			i, index[level] = len(all), len(all)
			all = append(all, Kept{Path: filepath.Join(dir, level)})
		}
		k := &all[i]
		k.Bytes += st.Blocks * 512
		if k.files = append(k.files, name); name == level {
			k.Used = time.Unix(st.Atim.Unix())
		}
	}
	for i := range all {
		if unlock, err := all[i].lock(); err == nil {
			unlock()
		} else if errors.Is(err, ErrInUse) {
			all[i].Used = time.Now()
			touch(all[i].Path, all[i].Used)
		}
	}
	return all, nil
}

// lock makes sure that nobody uses the level, nor makes it.
func (k *Kept) lock() (unlock func(), err error) {
	f, err := os.OpenFile(k.Path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, err
	}
	err = flock.Lock(f, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrInUse
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // it was only read
}

// Remove removes the level, unless somebody uses it: ErrInUse. It is made again when it is needed,
// also where there are others above it.
func (k *Kept) Remove() error {
	unlock, err := k.lock()
	if err != nil {
		return err
	}
	defer unlock()
	for _, name := range k.files {
		err := os.Remove(filepath.Join(filepath.Dir(k.Path), name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("a level that is not in use: %w", err)
		}
	}
	return nil
}

// touch notes that a level is used. That it was not changed can still be seen. A directory that
// cannot be written knows less well what was used last, and nothing else is wrong with it.
func touch(path string, when time.Time) {
	_ = unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{
		unix.NsecToTimespec(when.UnixNano()), {Nsec: unix.UTIME_OMIT}}, unix.AT_SYMLINK_NOFOLLOW)
}
