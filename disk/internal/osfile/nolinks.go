package osfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A directory of ours may lie in one that others can write to, as in a volume that the containers
// of a pod share. The functions here go through no symbolic link, wherever in the path it is, so
// that nobody makes us write to a file of their choice. The links in what an operator has named are
// resolved once, by resolved.

// Resolved is the path of a directory without links. It must be there.
func Resolved(dir string) (string, error) { return filepath.EvalSymlinks(dir) }

// ErrLinked is a file to be written to that has another name.
var ErrLinked = errors.New("the file has other names (hard links), by which it may be somebody " +
	"else's; remove the link, or the file")

// openDir opens a directory in order to do something in it.
func openDir(path string) (fd int, err error) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS}
	err = Retry(func() (err error) { fd, err = unix.Openat2(unix.AT_FDCWD, path, how); return err })
	if err == unix.ENOSYS || err == unix.EPERM {
		return walkDir(path) // kernels before 5.6, and some seccomp profiles
	}
	return fd, err
}

// walkDir is openDir step by step.
func walkDir(path string) (fd int, err error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	start := "."
	if filepath.IsAbs(path) {
		start = "/"
	}
	if err = Retry(func() (err error) { fd, err = unix.Open(start, flags, 0); return err }); err !=
		nil {
		return -1, err
	}
	for part := range strings.SplitSeq(path, "/") {
		if part == "" || part == "." {
			continue
		}
		var next int
		err := Retry(func() (err error) {
			next,
				err = unix.Openat(fd, part, flags|unix.O_NOFOLLOW, 0)
			return err
		})
		err = orLink(err, fd, part)
		unix.Close(fd)
		if err != nil {
			return -1, err
		}
		fd = next
	}
	return fd, nil
}

// orLink makes ELOOP of an ENOTDIR that means a link.
func orLink(err error, dir int, name string) error {
	var st unix.Stat_t
	if err == unix.ENOTDIR && unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return unix.ELOOP
	}
	return err
}

// in does something to a name in its directory.
func in(op, path string, do func(dir int, name string) error) error {
	dir, err := openDir(filepath.Dir(path))
	if err == nil {
		err = Retry(func() error { return do(dir, filepath.Base(path)) })
		unix.Close(dir)
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}

// OpenFile is os.OpenFile that also refuses, with errLinked, to open for writing what has another
// name.
func OpenFile(path string, flags int, mode fs.FileMode) (f *os.File, err error) {
	err = in("open", path, func(dir int, name string) error {
		fd, err := unix.Openat(dir, name, flags|OpenFlags, uint32(mode.Perm()))
		if err != nil {
			return orLink(err, dir, name)
		}
		var st unix.Stat_t
		if flags&unix.O_ACCMODE != unix.O_RDONLY {
			if err = Retry(func() error { return unix.Fstat(fd, &st) }); err == nil &&
				st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink > 1 {
				err = ErrLinked
			}
		}
		if err == nil {
			err = unix.SetNonblock(fd, false)
		}
		if err != nil {
			unix.Close(fd)
			return err
		}
		f = os.NewFile(uintptr(fd), path)
		return nil
	})
	return f, err
}

// Remove removes a file, or an empty directory, that may not be there.
func Remove(path string) error {
	err := in("remove", path, func(dir int, name string) error {
		err := unix.Unlinkat(dir, name, 0)
		if err == unix.EISDIR || err == unix.EPERM {
			if asDir := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); asDir != unix.ENOTDIR {
				return asDir
			}
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// RemoveAll removes a directory that may not be there, with all that is in it.
func RemoveAll(path string) error {
	err := Remove(path)
	if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	names, err := readNames(path)
	for _, name := range names {
		err = errors.Join(err, RemoveAll(filepath.Join(path, name)))
	}
	return errors.Join(err, Remove(path))
}

// readNames is what there is in a directory.
func readNames(path string) ([]string, error) {
	dir, err := OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return dir.Readdirnames(-1)
}

// Rename gives a file another name in its directory, with unix.RENAME_EXCHANGE in exchange for the
// one that has it.
func Rename(from, to string, flags uint) error {
	return in("rename", to, func(dir int, name string) error {
		if flags == 0 {
			return unix.Renameat(dir, filepath.Base(from), dir, name)
		}
		return unix.Renameat2(dir, filepath.Base(from), dir, name, flags)
	})
}

// MakeDir makes a directory for us alone.
func MakeDir(path string) error {
	return in("mkdir", path, func(dir int,
		name string) error {
		return unix.Mkdirat(dir, name, 0o700)
	})
}

// CheckOwner refuses a directory that somebody else has made, who could put into it what he likes.
// It is ours, or root's, or it may be written by a group that we are in, as in a volume that
// Kubernetes gives a group (fsGroup): there one user may come after another.
func CheckOwner(path string) error {
	dir, err := OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	var st unix.Stat_t
	if err := Retry(func() error { return unix.Fstat(int(dir.Fd()), &st) }); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	groups, _ := os.Getgroups() // without them it is the one group
	shared := st.Mode&unix.S_IWGRP != 0 &&
		slices.Contains(append(groups, os.Getegid()), int(st.Gid))
	if int(st.Uid) == os.Geteuid() || st.Uid == 0 || shared || madeAs(dir) == int(st.Uid) {
		return nil
	}
	return &fs.PathError{Op: "use", Path: path,
		Err: fmt.Errorf("it belongs to user %d, and this is user %d: remove it, or use another "+
			"directory: %w",
			st.Uid, os.Geteuid(), ErrForeign)}
}

// ErrForeign is a directory of another user.
var ErrForeign = errors.New("the directory of another user is not used")

// madeAs is the user that what we make in a directory belongs to, where the file system has its own
// idea of that, as file servers do; -1 where that is not known.
func madeAs(dir *os.File) int {
	name := fmt.Sprintf(".owner-%d", os.Getpid())
	var fd int
	err := Retry(func() (err error) {
		fd, err = unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|OpenFlags,
			0o600)
		return err
	})
	if err != nil {
		return -1
	}
	defer unix.Close(fd)
	defer unix.Unlinkat(int(dir.Fd()), name, 0)
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return -1
	}
	return int(st.Uid)
}
