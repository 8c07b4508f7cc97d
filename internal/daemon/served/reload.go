package served

import (
	"slices"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/serving"
)

// Reload applies new settings that can change while disks are served: the access mode, and whether
// a LUN can be written. It covers the disks of the plan. Each result names a disk and a setting,
// like "fedora.qcow2: read-only": done is in effect; later takes effect when the disk is served
// again, with the reason if there is one. After an error nothing has changed.
func (d *Disks) Reload(next options.Settings) (done, later []string, err error) {
	wanted, err := d.plan.Settle(next)
	if err != nil {
		return nil, nil, err
	}
	for i, s := range d.initial {
		now, restart := d.change(s, wanted[i])
		done, later = append(done, now...), append(later, restart...)
	}
	return done, later, nil
}

// change applies the settings of a disk that can change while it is served, each by itself. It
// returns the names of those that did and did not change.
func (d *Disks) change(s *Disk, next options.DiskSettings) (done, later []string) {
	free := s.turn.TryLock() // the holder may wait for storage, and nobody waits for that here
	if free {
		defer s.turn.Unlock()
	}
	away := !s.Serving()
	if away && free {
		return nil, nil // it was removed
	}
	have, now := s.look(), s.DiskSettings
	now.AccessMode, now.ReadOnly = have.access, have.readOnly
	keys := d.opt.Differences(now, next)
	if next.ReadOnly {
		// read-only before access-mode, so that nobody gets access and writes in between
		slices.Reverse(keys)
	}
	for _, key := range keys {
		name, to := s.Name+": "+key, now
		switch key {
		case d.opt.Setting(&d.opt.Settings.Disk.AccessMode).Key:
			to.AccessMode = next.AccessMode
		case d.opt.Setting(&d.opt.Settings.Disk.ReadOnly).Key:
			to.ReadOnly = next.ReadOnly
		default:
			later = append(later, name)
			continue
		}
		if away {
			later = append(later, name+" (the disk is being reverted: send SIGHUP again)")
			continue
		}
		if err := d.inUse.SetAccess(s.LUN, to.AccessMode, to.ReadOnly); err != nil {
			later = append(later, name+" ("+err.Error()+")")
			continue
		}
		s.changed(to.AccessMode, to.ReadOnly)
		done, now = append(done, name), to
	}
	return done, later
}

// changed records an access mode, and whether the disk can be written.
func (s *Disk) changed(access serving.AccessMode, readOnly bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.access, s.now.readOnly = access, readOnly
}
