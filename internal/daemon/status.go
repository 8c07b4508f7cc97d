package daemon

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/target"
)

// set sets the state of the daemon.
func (d *Daemon) set(now pages.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state = now
	if now == pages.StateReady {
		t := time.Now()
		d.readyAt = &t
	}
}

func (d *Daemon) setPortals(listeners []net.Listener) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.portals = nil
	for _, l := range listeners {
		d.portals = append(d.portals, l.Addr().String())
	}
}

// isReady returns nil once every LUN can be used. Otherwise it says what is missing.
func (d *Daemon) isReady() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == pages.StateReady {
		return nil
	}
	return errors.New(string(d.state))
}

// healthy returns nil unless a disk has failed.
func (d *Daemon) healthy() error {
	var all []error
	for _, s := range d.disks.all() {
		if err := d.disks.failure(s); err != nil {
			all = append(all, fmt.Errorf("%v: %w", s, err))
		}
	}
	return errors.Join(all...)
}

// Status returns the page /status. It may be called at any time, and waits for no disk for long.
func (d *Daemon) Status() pages.Status {
	d.mu.Lock()
	srv := d.target
	page := pages.Status{
		State:          d.state,
		Ready:          d.state == pages.StateReady,
		TargetName:     d.opt.TargetName,
		Portals:        append([]string{}, d.portals...),
		Authentication: "none",
		LUNs:           []pages.LUNStatus{},
		Sessions:       []target.SessionInfo{},
		StartedAt:      d.started,
		ReadyAt:        d.readyAt,
		Build:          d.opt.Build,
		Handover:       d.handover,
	}
	d.mu.Unlock()
	if page.ReadyAt != nil {
		page.ReadyAfterSeconds = page.ReadyAt.Sub(d.started).Seconds()
	}
	switch {
	case d.opt.CHAP.Mutual():
		page.Authentication = "mutual-chap"
	case d.opt.CHAP.Enabled():
		page.Authentication = "chap"
	}
	page.RefusedLogins = d.refused.latest(time.Now())
	page.Volumes = d.volumesStatus()
	luns, gauges := d.disks.status(page.Ready)
	for i, u := range readAll(gauges) {
		if u != nil {
			luns[i].Space = &pages.Space{Used: u.Used, Free: u.Available}
		}
	}
	page.LUNs = append(page.LUNs, luns...)
	page.UsageTypes = d.usageTypeStatus(luns)
	if srv != nil {
		page.Sessions = append(page.Sessions, srv.Sessions()...)
		for i, one := range page.LUNs {
			have := srv.Holders(one.LUN)
			page.LUNs[i].Owner, page.LUNs[i].OpenTo = have.Owner, have.Guest
			page.LUNs[i].Fenced = have.Fenced
			for _, t := range srv.Troubles(one.LUN) {
				page.LUNs[i].Troubles = append(page.LUNs[i].Troubles, pages.Trouble(t))
			}
		}
	}
	return page
}

// status returns the status of all disks, and the gauge of each.
func (t *table) status(ready bool) (luns []pages.LUNStatus, gauges []*gauge[disk.Usage]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.disks {
		if s.lun == 0 {
			continue
		}
		lun := s.statusLocked()
		lun.Ready = ready && s.now.serving
		luns, gauges = append(luns, lun), append(gauges, s.now.space)
	}
	return luns, gauges
}

// The caller holds table.mu.
func (s *servedDisk) statusLocked() pages.LUNStatus {
	lun := pages.LUNStatus{
		LUN:        s.lun,
		Image:      s.name,
		Format:     string(s.format),
		SizeBytes:  s.now.size,
		CopyMode:   string(s.now.settings.CopyMode),
		AccessMode: string(s.now.settings.AccessMode),
		ReadOnly:   s.now.settings.ReadOnly,
		Removable:  s.now.settings.Removable,
		UsageType:  s.now.settings.UsageType,
	}
	if s.now.instance != nil {
		lun.ReadOnly = s.now.settings.ReadOnly || s.now.instance.ReadOnly
		lun.Serial = s.now.instance.Identity.Serial
		lun.Persistent = s.now.instance.Persistent
		lun.NAA = hex.EncodeToString(s.now.instance.Identity.NAA[:])
	}
	if s.volume {
		lun.Volume = s.name
	}
	if s.progress != nil {
		copied, data := s.progress.Data()
		lun.Copy = &pages.CopyStatus{
			CopiedBytes: copied, DataBytes: data, TotalBytes: s.progress.Total(),
			Complete: s.progress.Finished(), WaitsForSpace: s.progress.Waiting(),
		}
	}
	if err := s.failureLocked(); err != nil {
		lun.Failure = err.Error()
	}
	return lun
}
