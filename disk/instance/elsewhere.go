package instance

import "kubevirt.io/disk/disk"

// Elsewhere makes an instance of a disk that another server has, whose identity stays what it is
// there. It has no directory, so no Store, and cannot Grow.
func Elsewhere(d disk.Disk, id disk.Identity, blockSize int, readOnly bool) *Instance {
	return &Instance{Disk: d, Identity: id, BlockSize: blockSize, ReadOnly: readOnly,
		Persistent: true, closed: d.Close}
}
