package image

import (
	"fmt"
	"strings"

	"kubevirt.io/disk/disk/internal/words"
)

// Error says why one file is not served, and what to do about it.
type Error struct {
	Name   string // of the file, relative to the image directory
	Format Format // as far as it was recognised
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
	PassedOver  []*Error // files that are no images, and need not be
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
