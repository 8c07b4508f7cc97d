package served

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Volume is a volume from before it is made until it is deleted, with its disk open or not. Nobody
// else gets its name and its number. The snapshot that it was cloned from stays until its disk has
// copied everything, which in most copy modes it never does.
type Volume struct {
	Name           string
	LUN            uint16 // 0: none
	Disk, Snapshot string // its origin, if it is a clone; "": it is none
	// Unknown says that its record cannot be read, so its origin is unknown.
	Unknown bool

	leaving bool // guarded by table.mu; nothing can be cloned from it any more
}

// ServeVolumes says that volumes of a directory with that identifier will be added. Without them,
// it is unknown which snapshots volumes need.
func (d *Disks) ServeVolumes(id string) { d.volumesID = id }

// AddVolume adds a volume. One of an earlier run keeps its name and its number, even if others have
// them. A new one has no number yet; it is refused with a *NameTakenError, or a *LeavingError.
func (d *Disks) AddVolume(v Volume, earlier bool) error {
	t := &d.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if !earlier {
		holder := cmp.Or(t.holderLocked(v.Name, 0, true), t.volumeLocked(v.Name, 0, v.Name))
		if holder != "" {
			return &NameTakenError{Name: v.Name, Holder: holder}
		}
		if from := t.volumes[v.Disk]; from != nil && from.leaving {
			return &LeavingError{v.Disk}
		}
	}
	if t.volumes == nil {
		t.volumes = map[string]*Volume{}
	}
	t.volumes[v.Name] = &v
	return nil
}

// TakeNumber gives a volume a number, unless it is taken.
func (d *Disks) TakeNumber(name string, lun uint16) bool {
	t := &d.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.kept[lun] != "" || t.holderLocked("", lun, true) != "" ||
		t.volumeLocked("", lun, name) != "" {
		return false
	}
	t.volumes[name].LUN = lun
	return true
}

// DropVolume removes a volume.
func (d *Disks) DropVolume(name string) {
	d.table.mu.Lock()
	defer d.table.mu.Unlock()
	delete(d.table.volumes, name)
}

// LeavingError says that a volume will be deleted, so it cannot be cloned.
type LeavingError struct{ Name string }

func (e *LeavingError) Error() string {
	return fmt.Sprintf("the volume %q is being deleted", e.Name)
}

// LeaveVolume says that a volume will be deleted; with false it revokes that. Meanwhile it cannot
// be cloned. If other volumes need it, LeaveVolume only returns these.
func (d *Disks) LeaveVolume(name string, leaving bool) (needed []string) {
	noted := d.notedClones(name)
	t := &d.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if leaving {
		needed = t.clonesLocked(name, "")
		for _, clone := range noted {
			if v := t.volumes[clone]; v != nil && v.Unknown {
				needed = append(needed, clone)
			}
		}
	}
	if v := t.volumes[name]; v != nil && len(needed) == 0 {
		v.leaving = leaving
	}
	return needed
}

// notedClones returns the volumes that the snapshots of a volume name as their clones. They may be
// deleted, or have been replaced by others of the same name.
func (d *Disks) notedClones(volume string) (names []string) {
	for _, s := range d.table.all() {
		inst := s.Instance()
		if s.Name != volume || inst == nil {
			continue
		}
		for _, one := range inst.Snapshots() {
			for _, clone := range one.Clones {
				by, name, _ := strings.Cut(clone, "/")
				if by == d.volumesID && !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	}
	return names
}

// clonesLocked returns the volumes that still need a snapshot of a disk ("": any snapshot), by
// name.
func (t *table) clonesLocked(disk, snapshot string) (names []string) {
	for _, v := range t.volumes {
		if v.Disk == disk && (snapshot == "" || v.Snapshot == snapshot) && !t.copiedLocked(v.Name) {
			names = append(names, v.Name)
		}
	}
	slices.Sort(names)
	return names
}

// copiedLocked reports whether the disk of a volume has copied everything.
func (t *table) copiedLocked(volume string) bool {
	return slices.ContainsFunc(t.disks, func(s *Disk) bool {
		return s.Volume && s.Name == volume && s.Progress != nil && s.Progress.Finished()
	})
}

// notedLocked reports whether a volume may still need a snapshot whose note names it, although the
// volume's record does not name the disk. The record may be unreadable, or the disk may have had
// another name, because its image was renamed.
func (t *table) notedLocked(s *Disk, snapshot, volume string) bool {
	v := t.volumes[volume]
	if v == nil || t.copiedLocked(volume) {
		return false
	}
	other := func(o *Disk) bool { return o != s && o.Name == v.Disk }
	return v.Unknown || v.Disk != "" && v.Snapshot == snapshot &&
		!slices.ContainsFunc(t.disks, other)
}
