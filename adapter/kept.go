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

// Kept is a level in a directory with its files, or the remains of making one.
type Kept struct {
	Path  string // of the level's file
	Bytes int64  // on storage, of all its files
	Used  time.Time
	files []string
}

// ErrInUse says that a level was not removed because a process uses it.
var ErrInUse = errors.New("the level is in use")

// IsLevel reports whether a file in a directory of Build is named like a level. The name identifies
// the content of the file.
func IsLevel(name string) bool {
	stem, ok := strings.CutSuffix(name, suffix)
	return ok && (stem == "empty" || strings.HasPrefix(stem, "layer-") ||
		strings.HasPrefix(stem, "image-"))
}

// IsTop reports whether a level is the top level of a disk, which holds the configuration only.
func IsTop(name string) bool { return IsLevel(name) && strings.HasPrefix(name, "image-") }

// List returns the levels that Build has made in a directory. A level whose file is locked (flock,
// shared) counts as used now. A missing directory has no levels.
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
		if !IsLevel(level) && !isPartial(name) {
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
		if locked, err := all[i].lock(); locked != nil {
			_ = locked.Close()
		} else if errors.Is(err, ErrInUse) {
			all[i].Used = time.Now()
			touch(all[i].Path, all[i].Used)
		}
	}
	return all, nil
}

// lock makes sure that no process uses or makes the level while the returned file is open. The file
// is nil if no file has the name.
func (k *Kept) lock() (*os.File, error) {
	f, err := flock.Open(k.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	named := false
	if err = flock.Lock(f, unix.LOCK_EX|unix.LOCK_NB); err == nil {
		named, err = flock.HasName(f, k.Path)
	}
	if errors.Is(err, unix.EWOULDBLOCK) || err == nil && !named {
		err = ErrInUse // or it was removed before the lock, and may have been made again
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Remove removes the level. If a process uses it, Remove returns ErrInUse. The level is made again
// when it is needed, even if higher levels exist.
func (k *Kept) Remove() error {
	locked, err := k.lock()
	if err != nil {
		return err
	}
	if locked != nil {
		defer locked.Close() // it was only read
	}
	for _, name := range k.files {
		path := filepath.Join(filepath.Dir(k.Path), name)
		if locked == nil && path == k.Path {
			continue // another process has made a level with that name meanwhile
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("a level that is not in use: %w", err)
		}
	}
	return nil
}

// touch records that a level is used. It does not change the time of modification. If the directory
// is read-only, touch does nothing and the order of use is less exact.
func touch(path string, when time.Time) {
	_ = unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{
		unix.NsecToTimespec(when.UnixNano()), {Nsec: unix.UTIME_OMIT}}, unix.AT_SYMLINK_NOFOLLOW)
}
