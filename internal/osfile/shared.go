package osfile

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Shared is a directory that processes of several users may share. If its group may write to it,
// files in it belong to that group, which may write to them, too. The process's umask, which
// usually prevents this, is not applied: the owner of the directory has decided what its group may
// do.
//
// Nothing leaves the directory: a link in it that leads elsewhere is refused.
type Shared struct {
	*os.Root
	gid     int
	byGroup bool // the group may write
	byAll   bool // everybody may, and may replace files of others
}

// OpenShared opens such a directory, and makes it with that mode if it is missing. A new one is
// shared like the directory above.
func OpenShared(dir string, mode fs.FileMode) (*Shared, error) {
	if err := makeShared(dir, mode); err != nil {
		return nil, err
	}
	return openShared(dir)
}

func openShared(dir string) (*Shared, error) {
	root, err := OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	s := &Shared{Root: root}
	var st unix.Stat_t
	top, err := root.Open(".")
	if err == nil {
		err = Call(top, func(fd int) error { return unix.Fstat(fd, &st) })
		err = errors.Join(err, top.Close())
	}
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	s.gid, s.byGroup = int(st.Gid), st.Mode&unix.S_IWGRP != 0
	s.byAll = st.Mode&unix.S_IWOTH != 0 && st.Mode&unix.S_ISVTX == 0
	return s, nil
}

func makeShared(dir string, mode fs.FileMode) error {
	above := filepath.Dir(dir)
	err := os.Mkdir(dir, mode)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeShared(above, mode); err == nil {
			err = os.Mkdir(dir, mode)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	s, err := openShared(above)
	if err != nil {
		return nil // the directory exists, and belongs to its owner alone
	}
	defer s.Close()
	s.shareName(filepath.Base(dir))
	return nil
}

// Share gives a file or directory to the group. It leaves files of others alone, and files with
// other names, which may be others' files. If it fails, others cannot use the file, and report
// that.
func (s *Shared) Share(f *os.File) {
	if !s.byGroup {
		return
	}
	_ = Call(f, func(fd int) error {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		want := uint32(unix.S_IRGRP | unix.S_IWGRP)
		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			want |= unix.S_IXGRP
		case st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink > 1:
			return nil
		}
		if int(st.Gid) != s.gid {
			if err := unix.Fchown(fd, -1, s.gid); err != nil && !s.byAll {
				return err
			}
		}
		if st.Mode&want == want {
			return nil
		}
		return unix.Fchmod(fd, st.Mode&0o7777|want) // it keeps the setgid bit of a directory
	})
}

func (s *Shared) shareName(name string) {
	if !s.byGroup {
		return
	}
	f, err := s.Root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|OpenFlags, 0)
	if err != nil {
		return
	}
	s.Share(f)
	f.Close()
}

// Mkdir makes a directory.
func (s *Shared) Mkdir(name string) error {
	return s.patient(func() error {
		err := s.Root.Mkdir(name, 0o770)
		if err == nil || errors.Is(err, fs.ErrExist) {
			s.shareName(name)
		}
		return err
	})
}

// MkdirAll makes a directory and those above it, where they are missing.
func (s *Shared) MkdirAll(name string) error {
	made := ""
	for part := range strings.SplitSeq(name, "/") {
		made = path.Join(made, part)
		if err := s.Mkdir(made); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// OpenFile opens a file. A new one is not shared before the caller calls Share, and an existing one
// may be anything. It never blocks on a FIFO.
func (s *Shared) OpenFile(name string, flags int) (f *os.File, err error) {
	err = s.patient(func() (err error) {
		f, err = s.Root.OpenFile(name, flags|OpenFlags, 0o660)
		return err
	})
	return f, err
}

// patient tries again for a moment: a process that has just made a directory or a file needs a
// moment to share it.
func (s *Shared) patient(do func() error) error {
	for end := time.Now().Add(20 * time.Millisecond); ; time.Sleep(2 * time.Millisecond) {
		err := do()
		if !s.byGroup || !errors.Is(err, fs.ErrPermission) || time.Now().After(end) {
			return err
		}
	}
}
