package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

// resolveFlags keep the resolution of a name inside its directory and refuse links.
const resolveFlags = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// errNoOpenat2 says that a name with a slash cannot be resolved safely here.
var errNoOpenat2 = errors.New("is in a subdirectory, and the kernel or the container's seccomp " +
	"profile lacks openat2, without which no subdirectory is opened")

// fileID identifies a file by its digest, by its device and inode, or else by its name.
type fileID struct {
	digest   string
	dev, ino uint64
	name     string
}

// directory is the image directory. It stays open, so every name is resolved in the directory that
// was scanned.
type directory struct {
	file *os.File
	path string
	// block devices are opened, too, because a person has named one
	devices bool
	// openat2 is the system call. Kernels before 5.6 and some seccomp profiles do not have it, so
	// tests can replace it.
	openat2 func(dirfd int, path string, how *unix.OpenHow) (int, error)
}

// openDirectory opens the image directory. Its path comes from the operator and may contain links.
func openDirectory(path string) (*directory, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("image directory: %w", err)
	}
	return &directory{file: f, path: path, openat2: unix.Openat2}, nil
}

func (d *directory) close() error { return d.file.Close() }

// notRegularError says that a name exists but is not a regular file.
type notRegularError struct{ what string }

func (e *notRegularError) Error() string { return "is " + e.what + ", not a regular file" }

// open opens the regular file of that name, directly in the directory.
func (d *directory) open(name string) (Source, *os.File, error) {
	return asSource(d.openAs(name, unix.O_RDONLY))
}

func asSource(f *os.File, st *unix.Stat_t, err error) (Source, *os.File, error) {
	if err != nil {
		return nil, nil, err
	}
	return &fileSource{file: f, stat: *st}, f, nil
}

// openAs is open with O_RDONLY or O_RDWR.
func (d *directory) openAs(name string, access int) (*os.File, *unix.Stat_t, error) {
	fd := int(d.file.Fd())
	// Look first, because opening a device can have an effect. If the file is replaced in between,
	// OpenFlags and the second look prevent harm.
	var st unix.Stat_t
	if err := osfile.Retry(func() error {
		return unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	}); err != nil {
		return nil, nil, err
	}
	if err := d.check(&st); err != nil {
		return nil, nil, err
	}
	return d.finish(name, func() (int, error) {
		return unix.Openat(fd, name, osfile.OpenFlags|access, 0)
	})
}

// openBeneath opens the regular file at a relative path. It never leaves the directory and never
// follows a link. Without openat2, it accepts only a name directly in the directory.
func (d *directory) openBeneath(name string) (Source, *os.File, error) {
	probe, err := d.resolve(name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		if strings.Contains(name, "/") {
			return nil, nil, errNoOpenat2
		}
		return d.open(name)
	}
	if err != nil {
		return nil, nil, err
	}
	var st unix.Stat_t
	err = osfile.Retry(func() error { return unix.Fstat(probe, &st) })
	unix.Close(probe)
	if err != nil {
		return nil, nil, err
	}
	if err := checkRegular(&st); err != nil {
		return nil, nil, err
	}
	return asSource(d.finish(name, func() (int, error) {
		return d.resolve(name, osfile.OpenFlags|unix.O_RDONLY)
	}))
}

// resolve calls openat2 with the rules for untrusted names.
func (d *directory) resolve(name string, flags uint64) (fd int, err error) {
	how := &unix.OpenHow{Flags: flags, Resolve: resolveFlags}
	// EAGAIN means that a concurrent rename may have moved the path out of the directory.
	for range 16 {
		err = osfile.Retry(func() (err error) {
			fd, err = d.openat2(int(d.file.Fd()), name, how)
			return err
		})
		if err != unix.EAGAIN {
			break
		}
	}
	return fd, err
}

// finish opens a file with open and checks the file.
func (d *directory) finish(name string, open func() (int, error)) (*os.File, *unix.Stat_t, error) {
	var fd int
	err := osfile.Retry(func() (err error) { fd, err = open(); return err })
	if err != nil {
		return nil, nil, err
	}
	var st unix.Stat_t
	if err = osfile.Retry(func() error { return unix.Fstat(fd, &st) }); err == nil {
		err = d.check(&st)
	}
	if err == nil {
		err = unix.SetNonblock(fd, false)
	}
	if err == nil && isDevice(&st) {
		st.Size, err = unix.Seek(fd, 0, unix.SEEK_END)
	}
	if err != nil {
		unix.Close(fd)
		return nil, nil, err
	}
	return os.NewFile(uintptr(fd), filepath.Join(d.path, name)), &st, nil
}

func (d *directory) check(st *unix.Stat_t) error {
	if d.devices && isDevice(st) {
		return nil
	}
	return checkRegular(st)
}

// isDevice reports whether a file is a block device. st has its size only after finish.
func isDevice(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFBLK }

// checkRegular returns a *notRegularError for everything but a regular file.
func checkRegular(st *unix.Stat_t) error {
	if kind := osfile.Kind(st); kind != "" {
		return &notRegularError{kind}
	}
	return nil
}

// explainOpen turns an error of open or openBeneath into a reason and an action.
func explainOpen(err error, use fileUse) (reason, action string) {
	var special *notRegularError
	switch {
	case errors.As(err, &special):
		return special.Error(),
			use.advice("put the image file itself there, or remove it",
				"name the image file itself", "put the file itself there")
	case errors.Is(err, errNoOpenat2):
		return errNoOpenat2.Error(), "put the file into the directory of the image itself"
	case errors.Is(err, unix.ELOOP):
		return "is a symbolic link, or is reached through one", "put the image file itself there"
	case errors.Is(err, unix.EXDEV):
		return "lies outside the directory of the image", "put it into that directory"
	case errors.Is(err, fs.ErrNotExist):
		return "does not exist", use.advice("add it to the image directory", "name a file that "+
			"exists", "add it to the directory of the image")
	case errors.Is(err, unix.EBUSY):
		return "is in use, perhaps mounted", "stop its other user first"
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM):
		const added = ": with chmod before it is added, or with \"ADD --chmod=0444\""
		return fmt.Sprintf("cannot be read by user %d: %v", os.Geteuid(), err),
			"make it readable for that user" + use.advice(added, "", added)
	default:
		return fmt.Sprintf("cannot be opened: %v", err), ""
	}
}

// OpenFile opens the image's own file again, for reading. It opens the file that was validated, and
// no backing files. It fails for an image that is no file of this machine.
func (m *Image) OpenFile() (*os.File, error) {
	if m.path == "" {
		return nil, fmt.Errorf("image %q is not a file of this machine", m.name)
	}
	dir, err := openDirectory(m.dir)
	if err != nil {
		return nil, err
	}
	defer dir.close()
	dir.devices = m.top.source == SourceDevice
	file, st, err := dir.openAs(filepath.Base(m.path), unix.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("image %q: %w", m.path, err)
	}
	was := m.top.bytes.Identity()
	if uint64(st.Dev) != was.Dev || st.Ino != was.Ino || st.Mtim.Nano() != was.MTime ||
		st.Size != m.top.bytes.Size() {
		err := errors.New("was exchanged after it was validated; start again")
		return nil, errors.Join(fmt.Errorf("image %q %w", m.path, err), file.Close())
	}
	return file, nil
}
