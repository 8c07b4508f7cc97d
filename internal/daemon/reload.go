package daemon

import (
	"slices"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/target"
)

// Changes are the results of a reload. Each entry names a disk and a setting, like "fedora.qcow2:
// read-only".
type Changes struct {
	Done  []string // in force
	Later []string // take effect when the disk is served again, with the reason if there is one
}

// lunAccess are the methods of the target that Reload needs.
type lunAccess interface {
	SetAccess(lun uint16, mode target.AccessMode, readOnly bool) error
}

// Reload puts new settings into force if they can change while disks are served: the access mode,
// and whether a LUN can be written. It covers the disks that are served from the start. After an
// error nothing has changed.
func (d *Daemon) Reload(next Settings) (Changes, error) {
	srv, err := d.serving()
	if err != nil {
		return Changes{}, err
	}
	return d.reload(next, srv)
}

func (d *Daemon) reload(next Settings, luns lunAccess) (all Changes, err error) {
	wanted, err := d.settle(next, d.found)
	if err != nil {
		return Changes{}, err
	}
	served := d.disks.served()
	for i, s := range d.initial {
		if !slices.Contains(served, s) {
			continue // it was removed
		}
		done, later := d.changeDisk(s, wanted[i], luns)
		all.Done, all.Later = append(all.Done, done...), append(all.Later, later...)
	}
	return all, nil
}

// changeDisk applies the settings of a disk that can change while it is served, each by itself, and
// names what did and did not change.
func (d *Daemon) changeDisk(s *servedDisk, next DiskSettings, luns lunAccess) (
	done, later []string) {
	now := d.disks.look(s).settings
	keys := now.Differences(next)
	if next.ReadOnly {
		// read-only before access-mode, so that nobody gets access and writes in between
		slices.Reverse(keys)
	}
	for _, key := range keys {
		name, to := s.name+": "+key, now
		switch key {
		case keyAccessMode:
			to.AccessMode = next.AccessMode
		case keyReadOnly:
			to.ReadOnly = next.ReadOnly
		default:
			later = append(later, name)
			continue
		}
		if err := luns.SetAccess(s.lun, to.AccessMode, to.ReadOnly); err != nil {
			later = append(later, name+" ("+err.Error()+")")
			continue
		}
		d.disks.changeAccess(s, to.AccessMode, to.ReadOnly)
		done, now = append(done, name), to
	}
	return done, later
}

// ReplaceCredentials sets the credentials for new logins. Sessions go on. It cannot turn CHAP on or
// off.
func (d *Daemon) ReplaceCredentials(c chap.Config) error {
	if d.auth == nil {
		return errNoCHAP
	}
	return d.auth.Replace(c)
}
