package served

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/serving"
)

// table has the disks of a daemon, in the order for people. Each has its own LUN. Any number of
// goroutines may use it.
type table struct {
	mu     sync.Mutex
	disks  []*Disk // guarded by mu
	closed bool    // guarded by mu; no new change may begin
	// volumes are all volumes, by name, whether their disks are open or not. Guarded by mu.
	volumes map[string]*Volume
	// kept are the numbers of disks whose images are gone. No new disk gets one. Guarded by mu.
	kept map[uint16]string

	// changes counts the disks that are being added or removed. It grows only with mu held and
	// closed unset, so close can wait for it.
	changes sync.WaitGroup
}

// ErrStopping is the reason why a disk cannot be added.
var ErrStopping = errors.New("the daemon is stopping")

// keep sets the numbers that no new disk gets.
func (t *table) keep(kept map[uint16]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = kept
}

// begin must be called before a disk is added or removed while the daemon runs, and changes.Done
// afterwards.
func (t *table) begin() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrStopping
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
func (t *table) add(disks ...plan.Disk) ([]*Disk, error) { return t.addFrom(origin{}, disks...) }

// addFrom is add for disks that come from another one.
func (t *table) addFrom(from origin, disks ...plan.Disk) ([]*Disk, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	users := make(map[uint16]string, len(t.disks)+len(disks))
	for _, s := range t.disks {
		users[s.LUN] = s.Name
	}
	added := make([]*Disk, len(disks))
	lowest := uint16(1)
	for i, d := range disks {
		holder := t.holderLocked(d.Name, d.LUN, d.Volume)
		if _, taken := users[d.LUN]; holder != "" && len(t.disks) > 0 && (d.LUN == 0 || !taken) {
			return nil, &NameTakenError{Name: d.Name, LUN: d.LUN, Holder: holder, Volume: d.Volume}
		}
		if d.Unserved {
			added[i] = newDisk(d)
			continue
		}
		for ; d.LUN == 0 && lowest <= serving.MaxNumber; lowest++ {
			_, taken := users[lowest]
			if !taken && t.kept[lowest] == "" &&
				(len(t.disks) == 0 || t.holderLocked("", lowest, d.Volume) == "") {
				d.LUN = lowest
			}
		}
		switch other, taken := users[d.LUN]; {
		case taken:
			return nil, fmt.Errorf("LUN %d is already used by %q, so %q needs another number",
				d.LUN, other, d.Name)
		case d.LUN == 0 || d.LUN > serving.MaxNumber:
			return nil, fmt.Errorf("there is no LUN for %q: a target has LUNs 1 to %d",
				d.Name, serving.MaxNumber)
		}
		users[d.LUN] = d.Name
		added[i] = newDisk(d)
	}
	for _, s := range added {
		s.origin = from
	}
	t.disks = append(t.disks, added...)
	return added, nil
}

// NameTakenError says that a disk cannot have a name or a number. Names of images, volumes and
// served snapshots, and numbers of LUNs, share one name space, because exports and commands find a
// disk by either. The first disk with a name keeps it.
type NameTakenError struct {
	Name   string
	LUN    uint16 // 0: none yet
	Holder string // what has the name or the number
	Volume bool   // the disk of an existing volume: names of new ones are checked earlier
}

func (e *NameTakenError) Error() string {
	what := fmt.Sprintf("the name %q", e.Name)
	if e.LUN != 0 {
		what += fmt.Sprintf(", or the number %d,", e.LUN)
	}
	advice := "use another one"
	if e.Volume {
		advice = "give that one another name, or another number (lun under disks), and restart"
	}
	return fmt.Sprintf("%s of a disk is taken by %s: disks are found by their names and by their "+
		"numbers, so %s", what, e.Holder, advice)
}

// holderLocked returns what has a name ("": none) or a number (0: none), or "". For a volume, other
// volumes do not count: its name and number were chosen with theirs in mind, or by an earlier
// version, which gave a volume "1" and another one the number 1. Both keep these.
func (t *table) holderLocked(name string, lun uint16, volume bool) string {
	for _, s := range t.disks {
		if !(volume && s.Volume) && has(s.Name, s.LUN, name, lun) {
			return s.String()
		}
	}
	if volume {
		return ""
	}
	return t.volumeLocked(name, lun, "")
}

// volumeLocked is holderLocked for all volumes except one.
func (t *table) volumeLocked(name string, lun uint16, except string) string {
	for _, v := range t.volumes {
		if v.Name != except && has(v.Name, v.LUN, name, lun) {
			return fmt.Sprintf("the volume %q", v.Name)
		}
	}
	return ""
}

// has reports whether a disk with the name called and the number number conflicts with a name ("":
// none) or a number (0: none).
func has(called string, number uint16, name string, lun uint16) bool {
	return name != "" && called == name || lun != 0 && serving.NumberIn(called) == lun ||
		number != 0 && (number == lun || number == serving.NumberIn(name))
}

// drop removes a disk that is no LUN, or could not become one.
func (t *table) drop(s *Disk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.disks = slices.DeleteFunc(t.disks, func(o *Disk) bool { return o == s })
}

func (t *table) find(lun uint16) *Disk {
	for _, s := range t.all() {
		if s.LUN == lun {
			return s
		}
	}
	return nil
}

func (t *table) all() []*Disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.disks)
}

// served returns the disks that are LUNs.
func (t *table) served() []*Disk {
	return slices.DeleteFunc(t.all(), func(s *Disk) bool { return !s.Serving() })
}
