package disk

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ImageError is one file that is not served: what is wrong with it and what to do.
type ImageError struct {
	Name   string // of the file, relative to the image directory
	Format Format // as far as it was recognised
	Reason string // what is wrong: completes the sentence "<file> ..."
	Action string // what to do about it; may be empty
	Err    error  // the cause, where there is one
}

func (e *ImageError) Error() string { return printable(e.Name) + ": " + e.Explain() }

// Explain is the message without the file's name.
func (e *ImageError) Explain() string {
	if e.Action == "" {
		return e.Reason
	}
	return e.Reason + "; " + e.Action
}

func (e *ImageError) Unwrap() error { return e.Err }

// ScanError is an image directory that is not served, with every file that stands in the way.
type ScanError struct {
	Dir   string
	Files []*ImageError // in natural order, at least one
}

func (e *ScanError) Error() string {
	var b strings.Builder
	if len(e.Files) == 1 {
		fmt.Fprintf(&b, "1 file in %s cannot be served:", e.Dir)
	} else {
		fmt.Fprintf(&b, "%d files in %s cannot be served:", len(e.Files), e.Dir)
	}
	for _, f := range e.Files {
		b.WriteString("\n  ")
		b.WriteString(f.Error())
	}
	return b.String()
}

// Unwrap gives errors.Is and errors.As every file's error.
func (e *ScanError) Unwrap() []error {
	errs := make([]error, len(e.Files))
	for i, f := range e.Files {
		errs[i] = f
	}
	return errs
}

// NoImagesError is an image directory without any file.
type NoImagesError struct {
	Dir         string
	Directories []string // subdirectories, which are not searched for images
}

func (e *NoImagesError) Error() string {
	msg := fmt.Sprintf("no disk image in %s: add a qcow2 or raw image to that directory", e.Dir)
	if len(e.Directories) > 0 {
		names := make([]string, len(e.Directories))
		for i, d := range e.Directories {
			names[i] = printable(d)
		}
		msg += fmt.Sprintf(" (its subdirectories are not searched: %s)", strings.Join(names, ", "))
	}
	return msg
}

// UnsupportedModeError is a copy mode that an image cannot be served in.
type UnsupportedModeError struct {
	Mode   CopyMode
	Image  string // empty: the mode is not supported for any image
	Reason string
	Use    string // what to use instead
}

func (e *UnsupportedModeError) Error() string {
	msg := fmt.Sprintf("copy mode %q", string(e.Mode))
	if e.Image != "" {
		msg += " for " + printable(e.Image)
	}
	return msg + ": " + e.Reason + "; " + e.Use
}

// SpaceError is a directory that has no room for what is to be written into it.
type SpaceError struct {
	Dir       string
	What      string // what needs the space
	Needed    int64  // bytes, in all; 0 where it is not known, as the disk filled up underway
	Available int64  // bytes
	FileSize  int64  // bytes: no file may be that large there, however much space is left; 0 where that is not what is wrong
}

func (e *SpaceError) Error() string {
	if e.FileSize > 0 {
		return fmt.Sprintf("%s takes a file of %s (%d bytes), and no file in %s can be that large, by its file system or a limit of the process (ulimit -f); "+
			"use a volume with another file system, such as XFS", e.What, byteCount(e.FileSize), e.FileSize, e.Dir)
	}
	if e.Needed == 0 {
		return fmt.Sprintf("%s: %s filled up while it was written, %s are left; make room or use a larger volume",
			e.What, e.Dir, byteCount(e.Available))
	}
	return fmt.Sprintf("%s needs up to %s (%d bytes) in %s, where %s (%d bytes) are available; make room or use a larger volume",
		e.What, byteCount(e.Needed), e.Needed, e.Dir, byteCount(e.Available), e.Available)
}

// Is makes the error one of ErrNoSpace.
func (e *SpaceError) Is(target error) bool { return target == ErrNoSpace }

// SizeError is a size that a disk cannot have.
type SizeError struct {
	Image  string
	Size   int64  // bytes, as asked for
	Reason string // what is wrong: completes the sentence "the size ..."
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("%s: the size of %d bytes %s", printable(e.Image), e.Size, e.Reason)
}

// PersistentError is a persistent disk that is not served, so that nothing on it is lost.
type PersistentError struct {
	Path   string // of the disk's file
	Reason string // what is wrong: completes the sentence "the persistent disk ..."
	Action string // what to do about it
}

func (e *PersistentError) Error() string {
	return fmt.Sprintf("the persistent disk %s %s; %s", e.Path, e.Reason, e.Action)
}

// LockedError is a directory or file that another process uses.
type LockedError struct {
	Path   string
	Holder string // who holds it, as far as that is known
}

func (e *LockedError) Error() string {
	return fmt.Sprintf("%s is in use by %s; stop that one first, or give each its own", e.Path, e.Holder)
}

// byteCount is a size for people: three digits, or four before the next binary unit.
func byteCount(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 1023.5 && unit < len(units)-1 {
		v /= 1024
		unit++
	}
	step := 1.0
	for step < 100 && v*step < 100 {
		step *= 10
	}
	return strconv.FormatFloat(math.Round(v*step)/step, 'f', -1, 64) + " " + units[unit:unit+1] + "iB"
}

// printable is a file name as it can stand in a message: names come from whoever built the image.
func printable(name string) string {
	for _, r := range name {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return fmt.Sprintf("%q", name)
		}
	}
	return name
}
