package instance

import (
	"context"
	"path/filepath"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/overlay"
)

// Snapshot describes a point in time of a disk.
type Snapshot = overlay.Snapshot

// SnapshotError says why something cannot be done with a snapshot. It may be one of the errors
// below, or disk.ErrNoSpace.
type SnapshotError = overlay.SnapshotError

// Why a snapshot is not made or found.
var (
	ErrSnapshotExists  = overlay.ErrSnapshotExists
	ErrSnapshotMissing = overlay.ErrSnapshotMissing
	ErrSnapshotInUse   = overlay.ErrSnapshotInUse
)

// TakeSnapshot names the present content of disks that are in use: all writes that were
// acknowledged before one point in time during the call, the same for all disks. Only changes wait,
// for as long as the writes take that are under way. If the disk is durable, all these writes are
// on storage when TakeSnapshot returns. A name has 1 to 63 letters, digits, '-', '_' and '.', and
// begins with a letter or a digit. After an error, which is a *SnapshotError, there is no snapshot
// of any of the disks.
func TakeSnapshot(ctx context.Context, name string, disks ...*Instance) error {
	var trees []*overlay.Tree
	for _, i := range disks {
		if err := i.mayHave(name); err != nil {
			return err
		}
		trees = append(trees, i.tree)
	}
	return overlay.TakeSnapshot(ctx, name, trees...)
}

// mayHave says why a disk has no snapshots at all, or returns nil.
func (i *Instance) mayHave(name string) error {
	if i.tree != nil {
		return nil
	}
	reason := "the image itself is served, so there is nothing that could be kept beside it; use " +
		"another copy mode"
	if i.dir == nil {
		reason = "another server has the disk; take it there"
	}
	return &SnapshotError{Disk: filepath.Base(i.path), Name: name, Reason: reason}
}

// Snapshots returns the snapshots of the disk, the oldest first.
func (i *Instance) Snapshots() []Snapshot {
	if i.tree == nil {
		return []Snapshot{}
	}
	return i.tree.Snapshots()
}

// DeleteSnapshot drops a snapshot. When it returns nil, the name is gone for good, and the space
// that only this snapshot needed is freed in the background. Errors: *SnapshotError with
// ErrSnapshotMissing, or ErrSnapshotInUse while a SnapshotDisk of it is open.
func (i *Instance) DeleteSnapshot(ctx context.Context, name string) error {
	return i.change(ctx, name, (*overlay.Tree).Delete)
}

// Revert makes the disk read as the snapshot again. Later writes are gone, other snapshots stay,
// and so does the size. Nobody may use the disk meanwhile. Errors: *SnapshotError.
func (i *Instance) Revert(ctx context.Context, name string) error {
	return i.change(ctx, name, (*overlay.Tree).Revert)
}

func (i *Instance) change(ctx context.Context, name string,
	change func(t *overlay.Tree, name string) error) error {
	if err := i.mayHave(name); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return change(i.tree, name)
}

// Committed remembers that an image has the content of the snapshot with an ID. Errors:
// *SnapshotError.
func (i *Instance) Committed(id, image string) error {
	if err := i.mayHave(id); err != nil {
		return err
	}
	return i.tree.Committed(id, image)
}

// NoteClone remembers that another disk begins from the snapshot with an ID, and forgets clones
// that are gone. Errors: *SnapshotError.
func (i *Instance) NoteClone(id, clone string, gone func(clone string) bool) error {
	if err := i.mayHave(id); err != nil {
		return err
	}
	return i.tree.NoteClone(id, clone, gone)
}

// CommittedBefore returns the IDs of the snapshots that d's content was made from, by the images
// that have the content of these snapshots.
func (i *Instance) CommittedBefore(d disk.Disk) map[string]string {
	history, ok := d.(disk.Historian)
	if !ok || i.tree == nil {
		return map[string]string{}
	}
	return i.tree.Images(history.Since())
}

// Viewed returns the names of the snapshots that are open, the oldest first.
func (i *Instance) Viewed() []string {
	if i.tree == nil {
		return nil
	}
	return i.tree.Viewed()
}

// Image returns the image.Contents of the image that the disk reads from. nil: it reads from none
// any more, or they are not known. Ranges that disk.Changed does not report are as in these files.
func (i *Instance) Image() []string {
	if i.img == nil {
		return nil
	}
	return image.Contents(i.img.Unhashed())
}

// SnapshotDisk is a snapshot as a read-only disk. The embedded Disk has the optional interfaces:
// disk.Extenter, disk.Estimator, disk.Layered and disk.Historian. Close it before the instance.
// Until then the snapshot cannot be deleted.
type SnapshotDisk struct {
	disk.Disk
	Snapshot disk.Snapshot // the snapshot that it shows
}

// OpenSnapshot opens a snapshot, any number of times. Errors: *SnapshotError.
func (i *Instance) OpenSnapshot(name string) (*SnapshotDisk, error) {
	if err := i.mayHave(name); err != nil {
		return nil, err
	}
	v, err := i.tree.View(name)
	if err != nil {
		return nil, err
	}
	return &SnapshotDisk{v, v.Snapshot()}, nil
}
