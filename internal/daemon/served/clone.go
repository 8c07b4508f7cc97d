package served

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/plan"
)

// Clone opens one more disk, whose content is a snapshot of another disk. Nobody can use it yet.
// Nothing is copied first. Until it has copied everything, which in most copy modes it never does,
// the snapshot cannot be deleted, and the other disk stays. It has the block size of the other
// disk, unless what.BlockSizeKnown is set: an existing clone keeps its own.
//
// If the other disk is not open, the error wraps fs.ErrNotExist. If it has no such snapshot, it
// wraps instance.ErrSnapshotMissing.
func (d *Disks) Clone(ctx context.Context, what plan.Disk, source, snapshot string) (*Disk, error) {
	from, err := d.source(source)
	if err != nil {
		return nil, err
	}
	inst := from.Instance()
	if inst == nil {
		return nil, &notOpenError{source}
	}
	if !inst.Persistent {
		return nil, &instance.SnapshotError{Disk: source, Name: snapshot, Reason: "the disk dies " +
			"with the daemon, and a clone of it would not: use a disk that is kept"}
	}
	what.BlockSize = cmp.Or(what.BlockSize, inst.BlockSize)
	if what.BlockSize != inst.BlockSize && !what.BlockSizeKnown {
		return nil, &instance.BlockSizeError{Image: what.Name, Asked: what.BlockSize,
			Reason: fmt.Sprintf("the disk %q, which it is cloned from, has blocks of %d bytes",
				source, inst.BlockSize),
			Advice: fmt.Sprintf("leave the block size out, or set it to %d", inst.BlockSize)}
	}
	opened, err := inst.OpenSnapshot(snapshot)
	if err != nil {
		return nil, err
	}
	err = inst.NoteClone(opened.Snapshot.ID, d.volumesID+"/"+what.Name, d.gone)
	if err != nil {
		_ = opened.Close() // it only ends the use of the snapshot
		return nil, err
	}
	digest := "snapshot:" + opened.Snapshot.ID // the serial number of the disk may change
	earlier := "snapshot:" + snapshotIdentity(inst, opened.Snapshot.ID).Serial
	name := snapshotName(from, snapshot)
	what.Image, err = image.OpenSource(ctx, name,
		func(context.Context, string) (image.Source, error) {
			return &instance.Source{Disk: opened.Disk,
				ID: image.Identity{Digest: digest}, Instance: inst}, nil
		}, image.Options{Formats: map[string]image.Format{name: image.FormatRaw},
			Alike: func(now, before string) bool { return now == digest && before == earlier }})
	if err != nil {
		_ = opened.Close() // it only ends the use of the snapshot
		return nil, err
	}
	what.BlockSizeKnown = true
	return d.openFrom(ctx, what, origin{clonedFrom: from})
}

// gone reports whether a noted clone was a volume of this directory, and does not exist any more.
// Otherwise the notes of a disk that is cloned again and again would grow for ever.
func (d *Disks) gone(clone string) bool {
	by, name, _ := strings.Cut(clone, "/")
	d.table.mu.Lock()
	defer d.table.mu.Unlock()
	return by == d.volumesID && d.table.volumes[name] == nil
}

// notOpenError says that a disk to clone is not open. It may be later.
type notOpenError struct{ name string }

func (e *notOpenError) Error() string {
	return fmt.Sprintf("the disk %q is not here: name a volume, or another disk that this daemon "+
		"keeps", e.name)
}

func (e *notOpenError) Unwrap() error { return fs.ErrNotExist }

// source finds the disk to clone: the only one with that name.
func (d *Disks) source(name string) (found *Disk, err error) {
	for _, s := range d.table.all() {
		switch {
		case s.Name != name || s.snapshotOf != nil:
		case found != nil:
			return nil, fmt.Errorf("LUNs %d and %d both have the name %q", found.LUN, s.LUN, name)
		default:
			found = s
		}
	}
	if found == nil {
		return nil, &notOpenError{name}
	}
	return found, nil
}

// clones returns the disks that still need a snapshot of a disk.
func (d *Disks) clones(s *Disk) (all []*Disk) {
	for _, o := range d.table.all() {
		if o.clonedFrom == s && !o.Progress.Finished() {
			all = append(all, o)
		}
	}
	return all
}

func (d *Disks) refuseIfCloned(s *Disk) error {
	var names []string
	for _, o := range d.clones(s) {
		names = append(names, o.String())
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%v: %w: %s read from it", s, instance.ErrSnapshotInUse,
		strings.Join(names, " and "))
}

// refuseIfNeeded refuses to delete a snapshot that clones may need. The volumes of this daemon know
// whether they do. Other clones are known only by the note in the snapshot.
func (d *Disks) refuseIfNeeded(s *Disk, one instance.Snapshot) error {
	d.table.mu.Lock()
	defer d.table.mu.Unlock()
	users := d.table.clonesLocked(s.Name, one.Name)
	for _, clone := range one.Clones {
		by, name, _ := strings.Cut(clone, "/")
		switch {
		case by == d.volumesID && !slices.Contains(users, name):
			if d.table.notedLocked(s, one.Name, name) {
				users = append(users, name)
			}
		case d.volumesID == "":
			users = append(users, fmt.Sprintf("the volume %q, or was: serve volumes "+
				"(--volumes-listen), and see", name))
		case by != d.volumesID:
			users = append(users, fmt.Sprintf("the volume %q of another directory of volumes, or "+
				"was: serve that one (--volumes-dir), and see", name))
		}
	}
	if len(users) == 0 {
		return nil
	}
	return fmt.Errorf("%w: it is needed by what was cloned from it, %s",
		instance.ErrSnapshotInUse, strings.Join(users, ", "))
}

// byDepth returns all disks in an order in which they can be closed: clones before the disks that
// they were cloned from.
func (d *Disks) byDepth() [][]*Disk {
	var levels [][]*Disk
	for _, s := range d.table.all() {
		depth := 0
		for o := s.clonedFrom; o != nil; o = o.clonedFrom {
			depth++
		}
		for len(levels) <= depth {
			levels = append(levels, nil)
		}
		levels[depth] = append(levels[depth], s)
	}
	slices.Reverse(levels)
	return levels
}
