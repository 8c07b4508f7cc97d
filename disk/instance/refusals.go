package instance

import (
	"fmt"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/words"
)

// UnsupportedModeError says that an image cannot be served in a copy mode.
type UnsupportedModeError struct {
	Mode   CopyMode
	Image  string // empty: the mode is not supported for any image
	Reason string
	Use    string // a better choice
}

func (e *UnsupportedModeError) Error() string {
	msg := fmt.Sprintf("copy mode %q", string(e.Mode))
	if e.Image != "" {
		msg += " for " + words.Name(e.Image)
	}
	return msg + ": " + e.Reason + "; " + e.Use
}

// SizeError says that a disk cannot have the requested size.
type SizeError struct {
	Image  string
	Size   int64  // bytes, as asked for
	Reason string // completes "the size ..."
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("%s: the size of %d bytes %s", words.Name(e.Image), e.Size, e.Reason)
}

// maxSize is the size of the largest disk, and of the largest image. Bytes. XFS allows larger
// files, but memory is needed for each MiB of a disk, and the daemon would run out of it.
const maxSize = image.DefaultMaxVirtualSize

func overMax(name string, size int64) error {
	return &SizeError{Image: name, Size: size, Reason: fmt.Sprintf("is more than the %d bytes "+
		"(%s) that a disk can have", int64(maxSize), words.Bytes(maxSize))}
}

// PersistentError says why a persistent disk is not served. Its data stays.
type PersistentError struct {
	Path   string // of the disk's file
	Reason string // completes "the persistent disk ..."
	Action string // what to do about it
}

func (e *PersistentError) Error() string {
	return fmt.Sprintf("the persistent disk %q %s; %s", e.Path, e.Reason, e.Action)
}
