package volume

import (
	"context"
	"time"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Disks makes the disks of volumes and serves them. Any number of goroutines may call its methods,
// but only one at a time for each volume. Errors about a request are *api.Error.
type Disks interface {
	// Default returns the values for fields that a request leaves out.
	Default() (api.Spec, error)
	// Place returns the directory of a place other than the volume's own.
	Place(p store.Place) (dir string, err error)
	// Single reports whether a volume may use the directory of PlaceRoot, which holds one disk.
	Single() bool
	// Enter says that there is a volume, from before it is made until Forget: nobody else gets its
	// name, and the snapshot that it was cloned from stays until its disk has copied everything. A
	// volume of an earlier run keeps its name and its number. A new one has no number; Enter
	// refuses it if its name is taken, or if it is cloned from a volume that is being deleted.
	Enter(r store.Record, earlier bool) error
	// TakeNumber gives a volume a number. It returns false if the number is taken.
	TakeNumber(name string, lun uint16) bool
	// Leave says that a volume will be deleted; with false it revokes that. Meanwhile nothing can
	// be cloned from it. If other volumes need it, Leave only returns these.
	Leave(name string, leaving bool) (needed []string)
	// Forget says that a volume was deleted.
	Forget(name string)
	// Open opens the disk, or makes it. Nobody can use it before Serve. If Open fails to make a
	// disk, the caller removes the rest in its directory.
	Open(ctx context.Context, d Disk) (Opened, error)
	// Waits says, for people, what a disk waits for that has been in the making since since. It is
	// quick.
	Waits(from *api.Source, since time.Time) string
}

// Disk is a disk to be opened.
type Disk struct {
	Name       string // of the volume
	LUN        uint16 // 0: it is not served
	Dir        string // its directory; the file is instance.PersistentName
	Size       int64  // smallest size, bytes; 0: the source's size, or no change
	BlockSize  int    // of a logical block, bytes; 0: the disk's, its snapshot's, or 512
	Source     *api.Source
	File       string // an image in Dir, from which the disk is made; "": none
	CopyMode   string
	AccessMode string
	UsageType  string // "": none
	There      bool   // the disk exists, and is opened; otherwise it is made
}

// Opened is a disk that is open.
type Opened interface {
	// Size is the size of the disk in bytes.
	Size() int64
	// BlockSize is the length of a logical block in bytes.
	BlockSize() int
	// Identity is how initiators recognise the disk.
	Identity() (serial, naa string)
	// Serve makes the disk a LUN. Initiators can use it when Serve returns.
	Serve() error
	// Grow enlarges the disk and tells its initiators.
	Grow(size int64) error
	// Copied reports whether the disk no longer needs its source and its File.
	Copied() bool
	// Ended is closed when Copied is true, or the disk is closed before that.
	Ended() <-chan struct{}
	// Failure says why the disk has failed, or nil. A failed disk must be opened again.
	Failure() error
	// Snapshots lists the snapshots of the disk, oldest first.
	Snapshots() []api.Snapshot
	// TakeSnapshot takes a snapshot of the disk, under a name that no other snapshot has.
	TakeSnapshot(ctx context.Context, name string) error
	// DeleteSnapshot deletes a snapshot. It refuses one that is in use.
	DeleteSnapshot(ctx context.Context, name string) error
	// Revert gives the disk the content of a snapshot. It refuses while initiators use the disk.
	Revert(ctx context.Context, name string) error
	// Changes lists a page of the ranges that may differ between a snapshot and the disk, or a
	// later snapshot. The answer has the offset of the next page, or the size if there is none.
	Changes(ctx context.Context, since string, page api.Page) (api.Changes, error)
	// Withdraw stops serving the disk, and leaves it open for Close. If initiators use the disk, it
	// does nothing and returns those whose present session has read or written it.
	Withdraw() (users []string, err error)
	// Close stops serving the disk: no command reaches it any more. When Close returns nil, nobody
	// uses the disk's files. If ctx ends first, closing goes on in the background, and another call
	// waits for it.
	Close(ctx context.Context) error
}
