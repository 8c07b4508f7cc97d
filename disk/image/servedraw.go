package image

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
)

// A file that was once served raw stays raw. A guest owns the content, and may write data that
// looks like another format. So the file gets a mark, an extended attribute. The attribute survives
// a rename, and a file that replaces this one does not have it. If the file system has no
// attributes, the mark is an empty file in a subdirectory next to the file. Its name is the file's
// identity.
const (
	rawAttribute = "user.kubevirt-disk.format"
	rawValue     = "raw"
)

// servedRaw reports whether an open file of the directory was served raw. After an error nobody
// knows, and the content must not decide either.
func (d *directory) servedRaw(file *os.File) (bool, error) {
	marked, err := hasRawMark(file)
	if marked || err != nil {
		return marked, err
	}
	name, err := markName(file)
	if err != nil {
		return false, err
	}
	var st unix.Stat_t
	err = osfile.Retry(func() error {
		return unix.Fstatat(int(d.file.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	})
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR):
		return false, nil
	}
	return false, &os.PathError{Op: "stat", Path: path.Join(d.path, name), Err: err}
}

// rememberRaw durably marks an open file of the directory as served raw. Call it before a guest can
// write to the file.
func (d *directory) rememberRaw(file *os.File) error {
	marked, err := d.servedRaw(file)
	if marked || err != nil {
		return err
	}
	if err = setRawMark(file); err == nil {
		return osfile.Retry(file.Sync)
	}
	if besideErr := d.markBeside(file); besideErr != nil {
		return errors.Join(err, besideErr)
	}
	return nil
}

// OpenRaw opens the file of a raw image again, with write also for writing. It checks again that
// the file is raw, because a guest owns its content from then on. It does not compare inodes: an
// overlay file system may give the file another one when it is opened for writing. OpenRaw releases
// the image's own lock of the file (Options.Hold), so that the caller can lock it.
func (m *Image) OpenRaw(write bool) (*os.File, error) {
	if m.top.local != nil {
		_ = flock.Lock(m.top.local, unix.LOCK_UN)
	}
	dir, err := openDirectory(m.dir)
	if err != nil {
		return nil, err
	}
	defer dir.close()
	device := m.top.source == SourceDevice
	dir.devices = device
	access := unix.O_RDONLY
	if write {
		access = unix.O_RDWR
	}
	if device && write {
		access |= unix.O_EXCL // fails if the device is mounted
	}
	file, st, err := dir.openAs(filepath.Base(m.path), access)
	if err != nil {
		reason, _ := explainOpen(err, useFound)
		return nil, fmt.Errorf("image %q %s: %w", m.path, reason, err)
	}
	head, tail, err := readEnds(file, st.Size)
	raw := err == nil && detect(head, tail) == nil || m.top.source == SourceTold || device
	if err == nil && !raw {
		raw, err = dir.servedRaw(file)
	}
	if err == nil && (!raw || st.Size != m.top.size) {
		err = errors.New("was exchanged after it was validated; start again")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("image %q %w", m.path, err), file.Close())
	}
	return file, nil
}

// RememberRaw marks the image's file as served raw. file comes from OpenRaw. Call it before a guest
// can write.
func (m *Image) RememberRaw(file *os.File) error {
	if m.top.source == SourceDevice {
		return nil // a device always counts as raw
	}
	dir, err := openDirectory(m.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.rememberRaw(file), dir.close())
}

// MarkRaw marks a file as raw: with an attribute or, if that is impossible, with a mark in the
// directory beside. With beside "", only the attribute is tried.
func MarkRaw(file *os.File, beside string) error {
	marked, err := hasRawMark(file)
	if marked {
		return nil
	}
	if err == nil {
		err = setRawMark(file)
	}
	if err == nil || beside == "" {
		return err
	}
	dir, dirErr := openDirectory(beside)
	if dirErr == nil {
		dirErr = errors.Join(dir.markBeside(file), dir.close())
	}
	if dirErr == nil {
		return nil
	}
	return errors.Join(err, dirErr)
}

// rememberCopy marks a copy of a raw disk as raw if its content looks like another format: a guest
// wrote that content. If the file system cannot keep the mark, a person has to say that the copy is
// raw, as for every file whose history is unknown.
func rememberCopy(file *os.File) error {
	st, err := file.Stat()
	if err != nil {
		return err
	}
	head, tail, err := readEnds(file, st.Size())
	if err == nil && detect(head, tail) != nil {
		_ = setRawMark(file)
	}
	return err
}

// hasRawMark reports whether the file has the attribute that says that it was served raw.
func hasRawMark(file *os.File) (bool, error) {
	value := make([]byte, len(rawValue)+1)
	n := 0
	err := osfile.Retry(func() (err error) {
		n, err = unix.Fgetxattr(int(file.Fd()), rawAttribute, value)
		return err
	})
	switch {
	case err == nil:
		return string(value[:n]) == rawValue, nil
	case noAttribute(err):
		return false, nil
	}
	return false, &os.PathError{Op: "getxattr", Path: file.Name(), Err: err}
}

// noAttribute reports whether an error of reading the attribute means that there is none: it is not
// set, it is another program's, the file system has no attributes, or a sandbox forbids them.
func noAttribute(err error) bool {
	none := []error{
		unix.ENODATA, unix.ERANGE, unix.EOPNOTSUPP, unix.ENOSYS, unix.EPERM, unix.EACCES,
	}
	return slices.ContainsFunc(none, func(e error) bool { return errors.Is(err, e) })
}

// setRawMark sets the attribute that says that the file is raw.
func setRawMark(file *os.File) error {
	err := osfile.Retry(func() error {
		return unix.Fsetxattr(int(file.Fd()), rawAttribute, []byte(rawValue), 0)
	})
	if err != nil {
		return &os.PathError{Op: "setxattr", Path: file.Name(), Err: err}
	}
	return nil
}

// markBeside creates the mark of a file whose file system has no attributes.
func (d *directory) markBeside(file *os.File) error {
	var dir, st unix.Stat_t
	err := errors.Join(unix.Fstat(int(d.file.Fd()), &dir), unix.Fstat(int(file.Fd()), &st))
	if err != nil {
		return err
	}
	// This happens if a single file is mounted into a container. The directory is then the
	// container's, and does not live as long as the file.
	if dir.Dev != st.Dev {
		return fmt.Errorf("%q is another file system than that of the file", d.path)
	}
	name, err := markName(file)
	if err != nil {
		return err
	}
	fd := int(d.file.Fd())
	err = osfile.Retry(func() error { return unix.Mkdirat(fd, rawfile.MarksDir, 0o755) })
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return &os.PathError{Op: "mkdir", Path: path.Join(d.path, rawfile.MarksDir), Err: err}
	}
	marks, err := d.openMarks()
	if err != nil {
		return err
	}
	defer marks.Close()
	mark := -1
	err = osfile.Retry(func() (err error) {
		flags := unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | osfile.OpenFlags
		mark, err = unix.Openat(int(marks.Fd()), path.Base(name), flags, 0o444)
		return err
	})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return &os.PathError{Op: "create", Path: path.Join(d.path, name), Err: err}
	}
	if err == nil {
		unix.Close(mark)
	}
	return errors.Join(osfile.Retry(marks.Sync), osfile.Retry(d.file.Sync))
}

// openMarks opens the subdirectory with the marks.
func (d *directory) openMarks() (*os.File, error) {
	fd := -1
	err := osfile.Retry(func() (err error) {
		fd, err = unix.Openat(int(d.file.Fd()), rawfile.MarksDir,
			unix.O_DIRECTORY|osfile.OpenFlags, 0)
		return err
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path.Join(d.path, rawfile.MarksDir), Err: err}
	}
	return os.NewFile(uintptr(fd), path.Join(d.path, rawfile.MarksDir)), nil
}

// markName returns the name of a file's mark. It has the file's handle, which differs even between
// files that had the same inode one after the other. If the file system has no handles, the name
// has the FileInstance.
func markName(file *os.File) (string, error) {
	var handle unix.FileHandle
	err := osfile.Retry(func() (err error) {
		handle, _, err = unix.NameToHandleAt(int(file.Fd()), "", unix.AT_EMPTY_PATH)
		return err
	})
	id := ""
	if err == nil {
		id = fmt.Sprintf("%d-%016x", handle.Type(), xxhash.Sum64(handle.Bytes()))
	} else if id = FileInstance(file); id == "" {
		return "", fmt.Errorf("%q: the file system does not tell its files apart: %w", file.Name(),
			err)
	}
	return path.Join(rawfile.MarksDir, "raw-"+id), nil
}

// FileInstance tells files of one name apart, by the inode's number and its time of birth, because
// numbers are used again. It returns "" if it cannot tell.
func FileInstance(f *os.File) string {
	var st unix.Statx_t
	err := osfile.Retry(func() error {
		return unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &st)
	})
	if err != nil || st.Mask&unix.STATX_INO == 0 {
		return ""
	}
	return fmt.Sprintf("%d-%d.%09d", st.Ino, st.Btime.Sec, st.Btime.Nsec)
}
