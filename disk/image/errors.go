package image

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// Error says why a file is not served, and what to do about it.
type Error struct {
	Name   string // of the file, relative to the image directory
	Format Format // FormatUnknown if it was not recognised
	Reason string // what is wrong: completes the sentence "<file> ..."
	Action string // what to do about it; may be empty
	Err    error  // the cause, if there is one
}

func (e *Error) Error() string { return words.Name(e.Name) + ": " + e.Explain() }

// Explain is the message without the file's name.
func (e *Error) Explain() string {
	if e.Action == "" {
		return e.Reason
	}
	return e.Reason + "; " + e.Action
}

func (e *Error) Unwrap() error { return e.Err }

// ScanError says why an image directory is not served. It lists every file with a fault.
type ScanError struct {
	Dir   string
	Files []*Error // in natural order, at least one
}

func (e *ScanError) Error() string {
	var b strings.Builder
	if len(e.Files) == 1 {
		fmt.Fprintf(&b, "1 file in %q cannot be served:", e.Dir)
	} else {
		fmt.Fprintf(&b, "%d files in %q cannot be served:", len(e.Files), e.Dir)
	}
	for _, f := range e.Files {
		b.WriteString("\n  ")
		b.WriteString(f.Error())
	}
	return b.String()
}

// Unwrap makes every file's error visible to errors.Is and errors.As.
func (e *ScanError) Unwrap() []error {
	errs := make([]error, len(e.Files))
	for i, f := range e.Files {
		errs[i] = f
	}
	return errs
}

// NoImagesError says that an image directory contains no file.
type NoImagesError struct {
	Dir         string
	Directories []string // subdirectories, which are not searched for images
	PassedOver  []*Error // files that do not count as images: see PassOver
}

func (e *NoImagesError) Error() string {
	msg := fmt.Sprintf("no disk image in %q: add a qcow2 or raw image to that directory", e.Dir)
	if len(e.Directories) > 0 {
		names := make([]string, len(e.Directories))
		for i, d := range e.Directories {
			names[i] = words.Name(d)
		}
		msg += fmt.Sprintf(" (its subdirectories are not searched: %s)", strings.Join(names, ", "))
	}
	if len(e.PassedOver) > 0 {
		names := make([]string, len(e.PassedOver))
		for i, f := range e.PassedOver {
			names[i] = words.Name(f.Name)
		}
		msg += fmt.Sprintf(" (no images: %s)", strings.Join(names, ", "))
	}
	return msg
}

// SpaceError says that a directory has no room for the data to be written.
type SpaceError struct {
	Dir       string
	What      string // what needs the space
	Needed    int64  // bytes in all; 0 if unknown, because the disk filled up underway
	Available int64  // bytes
	// the size of a file that is longer than the file system allows, in bytes; 0 if that is not
	// what is wrong
	FileSize int64
}

func (e *SpaceError) Error() string {
	if e.FileSize > 0 {
		return fmt.Sprintf("%s takes a file of %s (%d bytes), and no file in %q can be that "+
			"large, by its file system or a limit of the process (ulimit -f); use a volume with "+
			"another file system, such as XFS", e.What, words.Bytes(e.FileSize), e.FileSize, e.Dir)
	}
	if e.Needed == 0 {
		return fmt.Sprintf("%s: %q filled up while it was written, %s are left; make room or use "+
			"a larger volume", e.What, e.Dir, words.Bytes(e.Available))
	}
	return fmt.Sprintf("%s needs up to %s (%d bytes) in %q, where %s (%d bytes) are available; "+
		"make room or use a larger volume",
		e.What, words.Bytes(e.Needed), e.Needed, e.Dir, words.Bytes(e.Available), e.Available)
}

// AvailableSpace returns how many bytes an unprivileged user can still write to the directory's
// file system.
func AvailableSpace(dir string) (int64, error) { return osfile.AvailableSpace(dir) }

// NoRoom makes a *SpaceError of an error of writing in a directory that is full. It returns any
// other error as it is. what needs the room. size is the size of its file in bytes, or 0 for a
// small file.
func NoRoom(err error, dir, what string, size int64) error {
	switch {
	case errors.As(err, new(*SpaceError)):
	case errors.Is(err, unix.EFBIG) && size > 0:
		return &SpaceError{Dir: dir, What: what, FileSize: size}
	case disk.IsNoSpace(err):
		available, _ := osfile.AvailableSpace(dir) // 0 if it is unknown
		return &SpaceError{Dir: dir, What: what, Available: available}
	}
	return err
}

// Is makes errors.Is(err, disk.ErrNoSpace) true.
func (e *SpaceError) Is(target error) bool { return target == disk.ErrNoSpace }

// InTempDir adds advice to an error of writing to os.TempDir, if there is no room.
func InTempDir(err error) error {
	if errors.As(err, new(*SpaceError)) {
		return fmt.Errorf("%w (set TMPDIR to use another directory)", err)
	}
	return err
}
