package image

import (
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/words"
	"kubevirt.io/disk/internal/osfile"
)

// AvailableSpace returns how many bytes an unprivileged user can still write to the directory's
// file system.
func AvailableSpace(dir string) (int64, error) { return osfile.AvailableSpace(dir) }

// SpaceError says that a directory has no room for the data to be written.
type SpaceError struct {
	Dir       string
	What      string // what needs the space
	Needed    int64  // bytes in all; 0 if unknown, because the disk filled up underway
	Available int64  // bytes
	// the size of a file that is larger than any file may be there, however much space is left; 0
	// if that is not the fault; bytes
	FileSize int64
}

func (e *SpaceError) Error() string {
	if e.FileSize > 0 {
		return fmt.Sprintf("%s takes a file of %s (%d bytes), and no file in %q can be that "+
			"large, by its file system or a limit of the process (ulimit -f); "+
			"use a volume with another file system, such as XFS", e.What, words.Bytes(e.FileSize),
			e.FileSize, e.Dir)
	}
	if e.Needed == 0 {
		return fmt.Sprintf("%s: %q filled up while it was written, %s are left; make room or use "+
			"a larger volume",
			e.What, e.Dir, words.Bytes(e.Available))
	}
	return fmt.Sprintf("%s needs up to %s (%d bytes) in %q, where %s (%d bytes) are available; "+
		"make room or use a larger volume",
		e.What, words.Bytes(e.Needed), e.Needed, e.Dir, words.Bytes(e.Available), e.Available)
}

// Is makes errors.Is(err, disk.ErrNoSpace) true.
func (e *SpaceError) Is(target error) bool { return target == disk.ErrNoSpace }

// InTempDir adds what to do to an error of writing to os.TempDir, if that has no room.
func InTempDir(err error) error {
	if space := new(SpaceError); errors.As(err, &space) {
		return fmt.Errorf("%w (set TMPDIR to use another directory)", err)
	}
	return err
}
