package volume

import (
	"context"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Disks makes the disks of volumes and serves them. Its methods may be called by any number of
// goroutines, for one volume by one at a time. Errors that are about a request are *api.Error.
type Disks interface {
	// Default is what a request gets for the fields that it leaves out.
	Default() (api.Spec, error)
	// Place is the directory of a place that is not the volume's own.
	Place(p store.Place) (dir string, err error)
	// Single reports whether a volume may lie in the directory of PlaceRoot, which holds one disk.
	Single() bool
	// Taken reports whether something other than a volume has the LUN.
	Taken(lun uint16) bool
	// Open makes the disk, or opens the one that is there. Nobody can use it before Serve. If Open
	// was to make it and fails, the caller removes what is left in its directory.
	Open(ctx context.Context, d Disk) (Opened, error)
}

// Disk is a disk to be opened.
type Disk struct {
	Name       string // of the volume
	LUN        uint16 // 0: it is not to be served
	Dir        string // where it lies, or is to lie, as instance.PersistentName
	Size       int64  // bytes, at least; 0: that of its source, or what it has
	Source     *api.Source
	File       string // an image in Dir, which the disk is made of; "": none
	CopyMode   string
	AccessMode string
	UsageType  string // "": none
}

// Opened is a disk that is open.
type Opened interface {
	// Size is the size of the disk in bytes.
	Size() int64
	// Identity is how initiators recognise the disk.
	Identity() (serial, naa string)
	// Serve makes it a LUN, which initiators can use when it returns.
	Serve() error
	// Grow enlarges the disk, and tells its initiators.
	Grow(size int64) error
	// Completed is closed when the disk needs neither its source nor its File any more.
	Completed() <-chan struct{}
	// Failure says why the disk has failed, or nil. A failed disk must be opened again.
	Failure() error
	// Withdraw ends serving, and leaves the disk open for Close. If initiators use the disk, it
	// does nothing and returns those whose current session has read or written it.
	Withdraw() (users []string, err error)
	// Close ends serving: no command reaches the disk any more. When it returns nil, nothing uses
	// its files. If ctx ends first, closing goes on in the background, and a second call waits for
	// it.
	Close(ctx context.Context) error
}
