package disk

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Usage is what a disk takes of the storage below it. Bytes.
type Usage struct {
	Used      int64 // storage that the disk takes
	Available int64 // storage that it could still take, which others may take first
}

// Accountant is a disk that knows what storage it takes. Asked once, when the LUN is made.
type Accountant interface {
	// Usage may be out of date as soon as it returns. Same concurrency as ReadAt.
	Usage() (Usage, error)
}

// statBlock is the unit of st_blocks, whatever the block size of the file system. Bytes.
const statBlock = 512

var (
	_ Accountant = (*File)(nil)
	_ Accountant = (*overlay)(nil)
)

// Usage asks the file system. Space that it counts in another way, as compressing ones do, is told as it tells it.
func (f *File) Usage() (Usage, error) {
	fd := int(f.file.Fd())
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Usage{}, fmt.Errorf("space that %s takes: %w", f.file.Name(), err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return Usage{}, fmt.Errorf("space that is left for %s: %w", f.file.Name(), err)
	}
	return Usage{Used: st.Blocks * statBlock, Available: int64(fs.Bavail) * int64(fs.Bsize)}, nil
}

// Usage is that of the overlay's own file: what still lies in the image takes nothing of the storage that the disk is on.
func (o *overlay) Usage() (Usage, error) {
	if a, ok := o.file.(Accountant); ok {
		return a.Usage()
	}
	return Usage{}, errors.ErrUnsupported
}
