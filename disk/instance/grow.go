package instance

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/words"
	"kubevirt.io/disk/internal/osfile"
)

// Grow enlarges the disk to a size in bytes while it is used. The new part reads as zeros. The
// server of the disk tells the initiators (target.Server.ResizeLUN). If the disk is durable, its
// size is, too, when Grow returns nil: the next start finds it by the file. Make one call at a
// time, and none during Close.
//
// Errors: *SizeError, *image.SpaceError if no file can be that large, disk.ErrReadOnly.
func (i *Instance) Grow(size int64) error {
	name := filepath.Base(i.path)
	switch now := i.Size(); {
	case size == now:
		return nil
	case size < now:
		return &SizeError{Image: name, Size: size, Reason: fmt.Sprintf("is less than the %d bytes "+
			"(%s) that the disk has, and a disk is never made smaller", now, words.Bytes(now))}
	case size%int64(max(i.BlockSize, disk.SectorSize)) != 0:
		return notWhole(name, size, int64(max(i.BlockSize, disk.SectorSize)))
	case i.tree == nil:
		return &SizeError{Image: name, Size: size,
			Reason: "is not that of the image, which is served as it is"}
	}
	err := i.tree.Grow(size)
	if errors.Is(err, unix.EFBIG) || osfile.IsFull(err) {
		return &image.SpaceError{Dir: filepath.Dir(i.path), What: "the disk of " + words.Name(name),
			FileSize: size}
	}
	return err
}
