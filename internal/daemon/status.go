package daemon

import (
	"errors"
	"net"
	"slices"
	"time"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/status"
)

// set sets the state of the daemon.
func (d *Daemon) set(now status.State) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state = now
	if now == status.StateReady {
		t := time.Now()
		d.readyAt = &t
	}
}

func (d *Daemon) setPortals(listeners []net.Listener, nbd []nbdListener) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.portals = nil
	for _, l := range listeners {
		d.portals = append(d.portals, l.Addr().String())
	}
	for _, l := range nbd {
		d.atNBD = append(d.atNBD, l.address())
	}
}

// isReady returns nil once every LUN can be used. Otherwise it says what is missing.
func (d *Daemon) isReady() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == status.StateReady {
		return nil
	}
	return errors.New(string(d.state))
}

// boundPortals returns the portals of iSCSI, as bound.
func (d *Daemon) boundPortals() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.portals)
}

// Status returns the page /status. It may be called at any time, and waits for no disk for long.
func (d *Daemon) Status() status.Status {
	d.mu.Lock()
	srv, volumes := d.target, d.volumes
	page := status.Status{
		State:          d.state,
		Ready:          d.state == status.StateReady,
		TargetName:     d.opt.TargetName,
		Portals:        append([]string{}, d.portals...),
		NBDPortals:     d.atNBD,
		NBDTLS:         d.opt.NBDTLS != (options.NBDTLS{}),
		Authentication: status.AuthNone,
		Sessions:       []status.Session{},
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
		page.Authentication = status.AuthMutualCHAP
	case d.opt.CHAP.Enabled():
		page.Authentication = status.AuthCHAP
	}
	page.RefusedLogins = d.refused.latest(time.Now())
	page.Volumes = volumes.Status()
	page.LUNs, page.UsageTypes = d.disks.Status(page.Ready)
	if srv != nil {
		page.Sessions = append(page.Sessions, sessions{srv, d.nbd}.Sessions()...)
	}
	return page
}
