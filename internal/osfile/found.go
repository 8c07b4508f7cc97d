package osfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A path in a directory that others fill may lead to anything. Opening a named pipe waits for its
// other end, for ever and in spite of signals, and opening a device may already have an effect. The
// functions here look first, and never wait for ever. They follow symbolic links: volumes of
// Kubernetes are full of them.

// foundFlags open without waiting, in case the file was replaced after the look.
const foundFlags = os.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY

// KindDirectory is the Kind of a directory.
const KindDirectory = "a directory"

// NotRegularError says that a path leads to something that is not a regular file.
type NotRegularError struct{ Kind string }

func (e *NotRegularError) Error() string {
	return "it is " + e.Kind + ", not a regular file: name the file itself"
}

// Kind names the kind of a file that is not a regular one, by its mode: "" for a regular one.
func Kind(st *unix.Stat_t) string {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return ""
	case unix.S_IFLNK:
		return "a symbolic link"
	case unix.S_IFDIR:
		return KindDirectory
	case unix.S_IFIFO:
		return "a named pipe (FIFO)"
	case unix.S_IFSOCK:
		return "a socket"
	case unix.S_IFBLK:
		return "a block device"
	case unix.S_IFCHR:
		return "a character device"
	}
	return fmt.Sprintf("a file of type %#o", st.Mode&unix.S_IFMT)
}

// OpenRegular opens a regular file for reading. For any other kind, the error is a
// *NotRegularError.
func OpenRegular(path string) (*os.File, error) { return OpenRegularFile(path, os.O_RDONLY, 0) }

// OpenRegularFile is OpenRegular with the flags and the mode of os.OpenFile.
func OpenRegularFile(path string, flags int, mode fs.FileMode) (*os.File, error) {
	return openRegular(path, func() (fs.FileInfo, error) { return os.Stat(path) },
		func() (*os.File, error) { return os.OpenFile(path, flags|foundFlags, mode) })
}

// OpenRegularIn is OpenRegular within a directory.
func OpenRegularIn(root *os.Root, name string) (*os.File, error) {
	return openRegular(name, func() (fs.FileInfo, error) { return root.Stat(name) },
		func() (*os.File, error) { return root.OpenFile(name, foundFlags, 0) })
}

func openRegular(path string, look func() (fs.FileInfo, error),
	open func() (*os.File, error)) (*os.File, error) {
	check := func(info fs.FileInfo) error {
		if info.Mode().IsRegular() {
			return nil
		}
		st := unix.Stat_t{Mode: info.Sys().(*syscall.Stat_t).Mode}
		return &fs.PathError{Op: "open", Path: path, Err: &NotRegularError{Kind(&st)}}
	}
	info, err := look()
	if err == nil {
		err = check(info)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // open makes it, or reports the error
		return nil, err
	}
	f, err := open()
	if err != nil {
		return nil, err
	}
	if info, err = f.Stat(); err == nil {
		err = check(info)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// OpenText opens a file of settings for reading. It may be the pipe of a process substitution. A
// pipe that nobody writes to is an empty file.
func OpenText(path string) (*os.File, error) { return os.OpenFile(path, foundFlags, 0) }

const (
	// MaxText bounds ReadText, in bytes. The certificates of all authorities are a quarter of that.
	MaxText = 1 << 20
	// textTimeout is how long ReadText waits for the end. The pipe of a process substitution is
	// being written while it is read. But nobody writes to a pipe that was named by mistake, and a
	// terminal waits for a person.
	textTimeout = 10 * time.Second
)

// ReadText returns the content of a file of settings, which may be a pipe. It limits the memory and
// the time.
func ReadText(path string) ([]byte, error) { return readWithin(path, textTimeout) }

func readWithin(path string, timeout time.Duration) ([]byte, error) {
	var text []byte
	var err error
	done := make(chan struct{})
	// Opening a pipe may block for ever. This goroutine then ends with the process.
	go func() {
		defer close(done)
		var f *os.File
		if f, err = os.Open(path); err != nil {
			return
		}
		defer f.Close()
		text, err = io.ReadAll(io.LimitReader(f, MaxText+1))
		if err == nil && len(text) > MaxText {
			text, err = nil, &fs.PathError{Op: "read", Path: path,
				Err: fmt.Errorf("it is larger than %d bytes", MaxText)}
		}
	}()
	select {
	case <-done:
		return text, err
	case <-time.After(timeout):
		return nil, &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("it did not end within "+
			"%v: name a regular file, or a pipe that is written to and closed", timeout)}
	}
}

// WithoutPath returns the cause of an error about a file when the message already names the file,
// or must not name it.
func WithoutPath(err error) error {
	if perr, ok := errors.AsType[*fs.PathError](err); ok {
		return perr.Err
	}
	return err
}

// CheckWritable returns an error if this user cannot make files in a directory.
func CheckWritable(dir string) error {
	err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
	if err != nil {
		return &fs.PathError{Op: "access", Path: dir, Err: err}
	}
	return nil
}

// OpenRoot opens a directory, and nothing else.
func OpenRoot(path string) (*os.Root, error) {
	return os.OpenRoot(path + "/") // the kernel then refuses anything but a directory
}

// OpenDir opens a directory for reading or locking, and nothing else.
func OpenDir(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
}
