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

// table holds the disks of a daemon, in the order for people. Each has its own LUN. It is safe for
// concurrent use.
type table struct {
	mu     sync.Mutex
	disks  []*servedDisk // guarded by mu
	closed bool          // guarded by mu; no new change may begin

	// changes counts the disks that are being added or removed. It grows only with mu held and
	// closed unset, so close can wait for it.
	changes sync.WaitGroup
}

// servedDisk is a disk, from when the daemon knows it until it is closed.
type servedDisk struct {
	lun      uint16 // 0: it has none
	name     string // of the image
	dir      string // of a persistent disk; "": it is in the work directory
	format   image.Format
	image    *image.Image    // nil: a persistent disk without an image
	progress *image.Progress // nil: its mode copies nothing
	empty    bool            // see Disk.Empty
	volume   bool            // it is a volume's disk
	// container: it is made from a container image
	container bool

	after func() error // see Disk; guarded by ending

	copyAfter <-chan struct{} // nil: nothing is more urgent than copying the image

	now diskState // guarded by table.mu

	// ending is held while the disk is flushed or closed, so that no disk is closed during a flush.
	ending sync.Mutex
}

// diskState is the part of a disk's state that can change.
type diskState struct {
	settings DiskSettings       // in force
	size     int64              // bytes; 0: unknown yet
	instance *instance.Instance // nil: not opened yet, or closed
	space    *gauge[disk.Usage] // nil: the disk does not know
	contents *gauge[disk.Map]   // nil: the disk does not know
	serving  bool               // the target has it
}

func (s *servedDisk) String() string {
	if s.lun == 0 {
		return fmt.Sprintf("the disk of %q", s.name)
	}
	return fmt.Sprintf("LUN %d (%q)", s.lun, s.name)
}

// errStopping is the reason why a disk cannot be added.
var errStopping = errors.New("the daemon is stopping")

// begin must be called before a disk is added or removed while the daemon runs, and changes.Done
// afterwards.
func (t *table) begin() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return errStopping
	}
	t.changes.Add(1)
	return nil
}

// close waits for changes to end and lets no new one begin.
func (t *table) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.changes.Wait()
}

// add puts disks into the table. A disk without a LUN gets the lowest free one. It adds all disks
// or none.
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
		if d.unserved {
			added[i] = newServedDisk(d)
			continue
		}
		for ; d.LUN == 0 && lowest <= maxLUN; lowest++ {
			if _, taken := users[lowest]; !taken {
				d.LUN = lowest
			}
		}
		switch other, taken := users[d.LUN]; {
		case taken:
			return nil, fmt.Errorf("LUN %d is already used by %q, so %q needs another number",
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
		empty: d.Empty, volume: d.volume, container: d.container, after: d.after,
		copyAfter: d.CopyAfter,
		now:       diskState{settings: d.DiskSettings.resolved()}}
	if d.Image != nil {
		s.format, s.now.size = d.Image.Format(), d.Image.Size()
	}
	if s.now.settings.CopyMode != instance.CopyNone {
		s.progress = new(image.Progress)
	}
	return s
}

// opened records the instance of a disk.
func (t *table) opened(s *servedDisk, inst *instance.Instance) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.now.instance, s.now.size, s.now.space = inst, inst.Size(), newSpaceGauge(inst.Disk)
	s.now.contents = newMapGauge(inst.Disk)
}

// resized records the size of a disk that has grown.
func (t *table) resized(s *servedDisk, size int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.now.size = size
}

// has reports whether a disk has a LUN.
func (t *table) has(lun uint16) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(t.disks, func(s *servedDisk) bool { return s.lun == lun })
}

// serves records that the target has the disks.
func (t *table) serves(disks ...*servedDisk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range disks {
		s.now.serving = true
	}
}

// drop removes a disk that could not be added.
func (t *table) drop(s *servedDisk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dropLocked(s)
}

func (t *table) dropLocked(s *servedDisk) {
	t.disks = slices.DeleteFunc(t.disks, func(o *servedDisk) bool { return o == s })
}

// withdrawn records that the target no longer has a disk.
func (t *table) withdrawn(s *servedDisk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.now.serving = false
}

// remove returns the disk at a LUN, which the caller removes from the target and then drops. Until
// then no other disk gets its number: the target still has it.
func (t *table) remove(lun uint16) (*servedDisk, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.disks {
		if s.lun == lun && s.now.serving {
			s.now.serving = false
			return s, nil
		}
	}
	return nil, fmt.Errorf("there is no LUN %d", lun)
}

// all returns all disks.
func (t *table) all() []*servedDisk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.disks)
}

// find returns the disk at a LUN, or nil.
func (t *table) find(lun uint16) *servedDisk {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.disks {
		if s.lun == lun {
			return s
		}
	}
	return nil
}

// served returns the disks that the target has.
func (t *table) served() []*servedDisk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.disks), func(s *servedDisk) bool {
		return !s.now.serving
	})
}

// take returns the instance of a disk for the caller to close, or nil if there is none.
func (t *table) take(s *servedDisk) *instance.Instance {
	t.mu.Lock()
	defer t.mu.Unlock()
	inst := s.now.instance
	s.now.instance, s.now.space, s.now.contents = nil, nil, nil
	return inst
}

// look returns the current state of a disk.
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

// failureLocked tests the disk with an empty write, which changes nothing and waits for nothing.
// After a failed flush, every write returns ErrFailed. After the image has turned out to be wrong,
// every write returns ErrWrongContent, even on a read-only disk.
func (s *servedDisk) failureLocked() error {
	if s.now.instance == nil {
		return nil
	}
	if _, err := s.now.instance.WriteAt(nil, 0); errors.Is(err, disk.ErrFailed) ||
		errors.Is(err, disk.ErrWrongContent) {
		return err
	}
	return nil
}
