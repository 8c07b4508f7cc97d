package registry

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/cache"
)

// Others returns the images that were fetched as a whole into the directory of a cache. It is for
// cache.Options.
func Others(cacheDir string) func() ([]cache.Other, error) {
	return func() (all []cache.Other, err error) {
		root, err := osfile.OpenRoot(cacheDir)
		if err != nil {
			return nil, orMissing(err)
		}
		defer root.Close()
		entries, err := fs.ReadDir(root.FS(), fetchedDir)
		if err != nil {
			return nil, orMissing(err)
		}
		for _, e := range entries {
			if name, ok := strings.CutSuffix(e.Name(), lockSuffix); ok {
				o, otherErr := otherOf(root, cacheDir, path.Join(fetchedDir, name))
				if o.Bytes > 0 {
					all = append(all, o)
				}
				err = errors.Join(err, otherErr)
			}
		}
		return all, err
	}
}

// orMissing ignores that something does not exist.
func orMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// allOf are the names of all files of a fetched image but its lock: its disks, the rest of a fetch
// that was killed, and files of earlier versions.
func allOf(root *os.Root, base string) (names []string, err error) {
	entries, err := fs.ReadDir(root.FS(), fetchedDir)
	for _, e := range entries {
		name := path.Join(fetchedDir, e.Name())
		if rest, ok := strings.CutPrefix(name, base); ok && rest != lockSuffix &&
			(rest == "" || rest[0] == '.') {
			names = append(names, name)
		}
	}
	return names, err
}

// removeAll removes all files of a fetched image but its lock, which the caller has locked. First
// the directory of the disks loses its name, in one step: after a kill, a part of the disks under
// that name would be taken for all of them.
func removeAll(root *osfile.Shared, base string) error {
	err := root.Rename(base+rawSuffix, partialName(base))
	if err = orMissing(err); err != nil {
		return err
	}
	names, err := allOf(root.Root, base)
	for _, name := range names {
		if err == nil {
			err = root.RemoveAll(name)
		}
	}
	return err
}

// otherOf returns the files of a fetched image.
func otherOf(root *os.Root, cacheDir, base string) (cache.Other, error) {
	what, err := allOf(root, base)
	if err != nil {
		return cache.Other{}, err
	}
	o := cache.Other{Name: filepath.Join(cacheDir, base+rawSuffix),
		Remove: func() error { return removeFetched(cacheDir, base) }}
	for _, name := range what {
		err := fs.WalkDir(root.FS(), name, func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			if st, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() {
				o.Bytes += st.Blocks * 512
			}
			if path.Dir(name) == fetchedDir && info.ModTime().After(o.Used) {
				o.Used = info.ModTime()
			}
			return nil
		})
		if orMissing(err) != nil { // otherwise it was removed meanwhile
			return cache.Other{}, err
		}
	}
	return o, nil
}

// removeFetched removes the files of a fetched image, unless it is being fetched or served.
func removeFetched(cacheDir, base string) error {
	root, err := osfile.OpenShared(cacheDir, 0o770)
	if err != nil {
		return err
	}
	defer root.Close()
	lock, err := root.OpenFile(base+lockSuffix, os.O_RDWR)
	if err != nil {
		return err
	}
	defer lock.Close()
	err = flock.Lock(lock, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return cache.ErrInUse
	}
	if err != nil {
		return err
	}
	return removeAll(root, base)
}
