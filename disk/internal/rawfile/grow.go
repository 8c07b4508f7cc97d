package rawfile

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
)

// Grow enlarges the file by a hole while it is used. When it returns nil, the new size has reached
// storage as far as a Flush does. After an error the disk has its former size, and the file may
// have the new one. One call at a time.
func (f *File) Grow(size int64) error {
	if err := f.writable(); err != nil {
		return err
	}
	if before := f.Size(); size < before || size%disk.SectorSize != 0 {
		return fmt.Errorf("a disk of %d bytes cannot get %d bytes", before, size)
	}
	// Somebody may have made the file larger and written there. That must not become a part of it.
	st, err := f.File.Stat()
	if err != nil {
		return err
	}
	if st.Size() > f.Size() {
		if err := f.truncate(f.Size()); err != nil {
			return err
		}
	}
	if err := f.truncate(size); err != nil {
		return err
	}
	if err := f.Flush(); err != nil {
		return err
	}
	if f.holes != nil {
		f.holes.written.grow(size)
	}
	if f.guard != nil {
		f.guard.wanted.grow(size)
		f.guard.cached.grow(size)
	}
	f.size.Store(size)
	return nil
}

func (f *File) truncate(size int64) error {
	err := osfile.Call(f.File, func(fd int) error { return unix.Ftruncate(fd, size) })
	if err != nil {
		return &os.PathError{Op: "truncate", Path: f.File.Name(), Err: err}
	}
	return nil
}
