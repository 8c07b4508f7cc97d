package daemon

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/target"
)

// table holds the disks of a daemon, in the order in which people see them. No two have one LUN.
// Any number of goroutines.
type table struct {
	mu     sync.Mutex
	disks  []*servedDisk // guarded by mu
	closed bool          // guarded by mu; no change begins any more

	// changes are disks that are being added or removed, whoever does that. It grows with mu held,
	// and never once closed is set, so that it can be waited for.
	changes sync.WaitGroup
}

// servedDisk is a disk from when it is known until it is closed.
type servedDisk struct {
	lun      uint16
	name     string // of its image
	dir      string // of a persistent disk; "": it is in the work directory
	format   image.Format
	image    *image.Image    // nil: a persistent disk that is served without one
	progress *image.Progress // nil: nothing is copied in its mode

	now diskState // guarded by table.mu

	// ending is held while the disk is flushed or closed, so that none is closed that is being
	// flushed.
	ending sync.Mutex
}

// diskState is what changes of a disk.
type diskState struct {
	settings DiskSettings       // those in force
	size     int64              // bytes; 0: not known yet
	instance *instance.Instance // nil: not opened yet, or closed
	space    *spaceGauge        // nil: it cannot tell
	serving  bool               // the target has it
}

func (s *servedDisk) String() string { return fmt.Sprintf("LUN %d (%q)", s.lun, s.name) }

// errStopping is why there is no new disk.
var errStopping = errors.New("the daemon is stopping")

// begin is called before a disk is added or removed while the daemon runs, and changes.Done after.
func (t *table) begin() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return errStopping
	}
	t.changes.Add(1)
	return nil
}

// close waits until no disk is being added or removed, and lets nobody begin with that any more.
func (t *table) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.changes.Wait()
}

// add gives disks their places. A disk without a LUN gets the lowest that is free. Where one cannot
// be added, none is.
func (t *table) add(disks ...Disk) ([]*servedDisk, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	users := make(map[uint16]string, len(t.disks)+len(disks))
	for _, s := range t.disks {
		users[s.lun] = s.name
	}
	added := make([]*servedDisk, len(disks))
	lowest := uint16(1)
	for i, d := range disks {
		for ; d.LUN == 0 && lowest <= maxLUN; lowest++ {
			if _, taken := users[lowest]; !taken {
				d.LUN = lowest
			}
		}
		switch other, taken := users[d.LUN]; {
		case taken:
			return nil, fmt.Errorf("LUN %d is %q already, and cannot be %q as well",
				d.LUN, other, d.Name)
		case d.LUN == 0 || d.LUN > maxLUN:
			return nil, fmt.Errorf("there is no LUN for %q: a target has LUNs 1 to %d",
				d.Name, maxLUN)
		}
		users[d.LUN] = d.Name
		added[i] = newServedDisk(d)
	}
	t.disks = append(t.disks, added...)
	return added, nil
}

func newServedDisk(d Disk) *servedDisk {
	s := &servedDisk{lun: d.LUN, name: d.Name, dir: d.Dir, image: d.Image, format: image.FormatRaw,
		now: diskState{settings: d.DiskSettings.resolved()}}
	if d.Image != nil {
		s.format, s.now.size = d.Image.Format(), d.Image.Size()
	}
	if s.now.settings.CopyMode != instance.CopyNone {
		s.progress = new(image.Progress)
	}
	return s
}

// opened notes what a disk was opened as.
func (t *table) opened(s *servedDisk, inst *instance.Instance) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.now.instance, s.now.size, s.now.space = inst, inst.Size(), newSpaceGauge(inst.Disk)
}

// serves notes that the target has the disks.
func (t *table) serves(disks ...*servedDisk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range disks {
		s.now.serving = true
	}
}

// drop takes a disk away that could not be added.
func (t *table) drop(s *servedDisk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dropLocked(s)
}

func (t *table) dropLocked(s *servedDisk) {
	t.disks = slices.DeleteFunc(t.disks, func(o *servedDisk) bool { return o == s })
}

// remove takes away the disk that is served at a LUN.
func (t *table) remove(lun uint16) (*servedDisk, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.disks {
		if s.lun == lun && s.now.serving {
			t.dropLocked(s)
			return s, nil
		}
	}
	return nil, fmt.Errorf("there is no LUN %d", lun)
}

// all are the disks that there are.
func (t *table) all() []*servedDisk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.disks)
}

// served are the disks that the target has.
func (t *table) served() []*servedDisk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.disks), func(s *servedDisk) bool {
		return !s.now.serving
	})
}

// take returns the instance of a disk, which is then the caller's to close; nil: there is none.
func (t *table) take(s *servedDisk) *instance.Instance {
	t.mu.Lock()
	defer t.mu.Unlock()
	inst := s.now.instance
	s.now.instance, s.now.space = nil, nil
	return inst
}

// look is a disk as it is at the moment.
func (t *table) look(s *servedDisk) diskState {
	t.mu.Lock()
	defer t.mu.Unlock()
	return s.now
}

func (t *table) changeAccess(s *servedDisk, mode target.AccessMode, readOnly bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.now.settings.AccessMode, s.now.settings.ReadOnly = mode, readOnly
}

// failure says why a disk has failed for good, or nil.
func (t *table) failure(s *servedDisk) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return s.failureLocked()
}

// failureLocked asks by a write of nothing, which changes nothing and waits for nothing: after a
// failed flush every write returns ErrFailed.
func (s *servedDisk) failureLocked() error {
	if s.now.instance == nil {
		return nil
	}
	if _, err := s.now.instance.WriteAt(nil, 0); errors.Is(err, disk.ErrFailed) {
		return err
	}
	return nil
}
