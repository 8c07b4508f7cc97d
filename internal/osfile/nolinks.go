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

// A directory of ours may be in one that others can write to, such as a volume that the containers
// of a pod share. The functions here follow no symbolic link anywhere in a path, so nobody can make
// us write to a file of their choice. Resolved follows the links in a path that an operator has
// named, once.

// Resolved returns the path of a directory without links. The directory must exist.
func Resolved(dir string) (string, error) { return filepath.EvalSymlinks(dir) }

// ResolvedFile is Resolved for the directory of a file, which need not exist.
func ResolvedFile(path string) (string, error) {
	dir, err := Resolved(filepath.Dir(path))
	return filepath.Join(dir, filepath.Base(path)), err
}

// ErrLinked says that a file cannot be written to because it has another name.
var ErrLinked = errors.New("the file has other names (hard links) and may be somebody else's; " +
	"remove the link, or the file")

// openDir opens a directory for the *at system calls.
func openDir(path string) (fd int, err error) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS}
	err = Retry(func() (err error) { fd, err = unix.Openat2(unix.AT_FDCWD, path, how); return err })
	if err == unix.ENOSYS || err == unix.EPERM {
		return walkDir(path) // kernels before 5.6, and some seccomp profiles
	}
	return fd, err
}

// walkDir is openDir for kernels without openat2: it opens one part of the path after the other.
func walkDir(path string) (fd int, err error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	start := "."
	if filepath.IsAbs(path) {
		start = "/"
	}
	err = Retry(func() (err error) { fd, err = unix.Open(start, flags, 0); return err })
	if err != nil {
		return -1, err
	}
	for part := range strings.SplitSeq(path, "/") {
		if part == "" || part == "." {
			continue
		}
		var next int
		err := Retry(func() (err error) {
			next, err = unix.Openat(fd, part, flags|unix.O_NOFOLLOW, 0)
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

// orLink returns ELOOP for an ENOTDIR that a link has caused.
func orLink(err error, dir int, name string) error {
	var st unix.Stat_t
	if err == unix.ENOTDIR && unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return unix.ELOOP
	}
	return err
}

// inDirOf opens the directory of path and calls do for the name in it.
func inDirOf(op, path string, do func(dir int, name string) error) error {
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

// OpenFile is like os.OpenFile, but refuses to open a file for writing that has another name:
// ErrLinked.
func OpenFile(path string, flags int, mode fs.FileMode) (f *os.File, err error) {
	err = inDirOf("open", path, func(dir int, name string) error {
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

// Remove removes a file or an empty directory, if it exists.
func Remove(path string) error {
	err := inDirOf("remove", path, func(dir int, name string) error {
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

// RemoveAll removes a directory and everything in it, if it exists.
func RemoveAll(path string) error {
	err := Remove(path)
	if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	names, err := Names(path)
	for _, name := range names {
		err = errors.Join(err, RemoveAll(filepath.Join(path, name)))
	}
	return errors.Join(err, Remove(path))
}

// Names lists a directory.
func Names(path string) ([]string, error) {
	dir, err := OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return dir.Readdirnames(-1)
}

// Rename renames a file within its directory. With the flag unix.RENAME_EXCHANGE the two files swap
// their names, and with unix.RENAME_NOREPLACE it replaces nothing.
func Rename(from, to string, flags uint) error {
	return inDirOf("rename", to, func(dir int, name string) error {
		switch flags {
		case 0:
			return unix.Renameat(dir, filepath.Base(from), dir, name)
		case unix.RENAME_NOREPLACE:
			return renameNew(dir, filepath.Base(from), dir, name)
		}
		return unix.Renameat2(dir, filepath.Base(from), dir, name, flags)
	})
}

// renameNew renames a file, and replaces nothing. Some file systems, such as NFS, cannot do both in
// one step.
func renameNew(old int, name string, dir int, to string) error {
	err := unix.Renameat2(old, name, dir, to, unix.RENAME_NOREPLACE)
	if err != unix.EINVAL {
		return err
	}
	switch err = unix.Fstatat(dir, to, new(unix.Stat_t), unix.AT_SYMLINK_NOFOLLOW); err {
	case nil:
		return unix.EEXIST
	case unix.ENOENT:
		return unix.Renameat(old, name, dir, to)
	}
	return err
}

// Move renames a file or directory into another directory of the same file system. It replaces
// nothing.
func Move(from, to string) error {
	return inDirOf("rename", from, func(old int, name string) error {
		dir, err := openDir(filepath.Dir(to))
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		return renameNew(old, name, dir, filepath.Base(to))
	})
}

// MakeDir makes a directory that only our user can use.
func MakeDir(path string) error {
	return inDirOf("mkdir", path, func(dir int, name string) error {
		return unix.Mkdirat(dir, name, 0o700)
	})
}

// CheckOwner refuses a directory of another user, who could put anything into it: ErrForeign. It
// accepts a directory of ours or of root, and one that a group of ours can write to. Kubernetes
// gives a volume such a group (fsGroup), and its users may change.
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
	groups, _ := os.Getgroups() // if this fails, only our own group counts
	shared := st.Mode&unix.S_IWGRP != 0 &&
		slices.Contains(append(groups, os.Getegid()), int(st.Gid))
	if int(st.Uid) == os.Geteuid() || st.Uid == 0 || shared || madeAs(dir) == int(st.Uid) {
		return nil
	}
	return &fs.PathError{Op: "use", Path: path,
		Err: fmt.Errorf("it belongs to user %d, and this is user %d: remove it, or use another "+
			"directory: %w", st.Uid, os.Geteuid(), ErrForeign)}
}

// ErrForeign says that a directory belongs to another user.
var ErrForeign = errors.New("the directory of another user is not used")

// madeAs returns the owner of files that we make in a directory, or -1 if it is unknown. File
// servers may give our files to another user.
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
