package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/served"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

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

// isReady returns nil once every LUN can be used, and then as long as one can. Otherwise it says
// what is missing.
func (d *Daemon) isReady() error {
	d.mu.Lock()
	now := d.state
	d.mu.Unlock()
	if now == status.StateReady {
		return d.disks.Unusable()
	}
	if c := d.starting(now); c != nil {
		return fmt.Errorf("%s: %s, since %s", now, c.Reason, c.Since.Format(time.RFC3339))
	}
	return errors.New(string(now))
}

// starting is what the start waits for; nil: the start is over.
func (d *Daemon) starting(now status.State) *status.Condition {
	c := &status.Condition{State: status.DiskStarting, Since: d.started}
	switch now {
	case status.StateStarting:
		what, since := d.sources.Step()
		if what.Name == "" {
			c.Reason = "it looks at the images"
			break
		}
		c.Since, c.Reason = since, "it waits for "+what.Name
		if why := served.Why(what, since); why != "" || time.Since(since) >= serving.LongWait {
			c.Kind = what.Kind
			c.WhatToDo = "see whether it runs, and whether this machine reaches it"
			c.Reason += cmp.Or(why, ", which does not answer")
		}
	case status.StateOpening:
		c.Reason = "it opens the disks"
		if disk, one := d.disks.Opening(); disk != "" {
			c.Since, c.Reason = one.Since, disk+": "+one.Reason
		}
	default:
		return nil
	}
	return c
}

func (d *Daemon) boundPortals() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.portals)
}

// Status returns the content of the page /status. It may be called at any time, and waits for no
// disk for long.
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
		WorkDir:        d.workDir(),
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
	page.Starting = d.starting(page.State)
	page.RefusedLogins = d.refused.latest(time.Now())
	page.Volumes = volumes.Status()
	page.LUNs, page.UsageTypes = d.disks.Status(page.Ready)
	if srv != nil {
		for i := range page.LUNs {
			if d.vhost != nil {
				if path := d.vhost.Socket(page.LUNs[i].LUN); path != "" {
					page.LUNs[i].VhostUser = absolute(path)
				}
			}
		}
		page.Sessions = append(page.Sessions, d.sessionsWith(srv).Sessions()...)
	}
	return page
}

// workDir is the work directory that a person has named, or "".
func (d *Daemon) workDir() string {
	if !d.opt.WorkDirNamed {
		return ""
	}
	return absolute(d.opt.WorkDir)
}

// announce logs what is served and how to log in.
func (d *Daemon) announce() {
	s := d.Status()
	d.disks.Announce()
	password, user := "", ""
	if d.opt.CHAP.Enabled() {
		password, user = "LIBISCSI_CHAP_PASSWORD=... ", "USERNAME"
	}
	if len(s.Portals)+len(s.NBDPortals) == 0 {
		d.log.Info("ready", zap.String("vhost_user", d.opt.VhostUserDir),
			zap.Duration("after", time.Since(d.started)))
		return
	}
	if len(s.Portals) == 0 {
		d.log.Info("ready", zap.Strings("nbd_portals", s.NBDPortals),
			zap.Duration("after", time.Since(d.started)),
			zap.String("try", "nbdinfo --list "+nbdURI(&s, "")))
		return
	}
	try := password + "iscsi-ls -s " + ISCSIURI(&s, user, 0)
	if d.opt.BehindNAT && len(s.LUNs) > 0 { // iscsi-ls would list nothing
		try = password + "qemu-img info " + ISCSIURI(&s, user, s.LUNs[0].LUN)
	}
	d.log.Info("ready", zap.String("target", s.TargetName), zap.Strings("portals", s.Portals),
		zap.String("authentication", s.Authentication),
		zap.Duration("after", time.Since(d.started)), zap.String("try", try))
	remote := func(a options.Address) bool { return !a.Loopback() }
	switch {
	case d.opt.CHAP.Enabled():
	case slices.ContainsFunc(d.opt.Portals, remote):
		d.log.Warn("there is no CHAP: whoever reaches a portal can use the disks",
			zap.Strings("portals", s.Portals))
	default:
		d.log.Warn("there is no CHAP, so only this machine, or this container or pod, can use the "+
			"disks: "+d.opt.Setting(&d.opt.CHAP).String()+" let others log in",
			zap.Strings("portals", s.Portals))
	}
}

// ISCSIURI is the URI of a LUN at the first portal for libiscsi's clients on this machine; with lun
// 0, the portal's. user is the name for CHAP, or "". No URI has the password.
func ISCSIURI(s *status.Status, user string, lun uint16) string {
	if user != "" {
		user += "@"
	}
	uri := "iscsi://" + user + options.Reachable(s.Portals[0])
	if lun == 0 {
		return uri
	}
	return uri + "/" + libvirt.SourceName(s.TargetName, int(lun))
}

// NBDURI is the URI of a disk at the first portal of NBD, for a client on this machine. It names no
// other disk of that name.
func NBDURI(s *status.Status, l *status.LUN) string {
	return nbdURI(s, pages.ExportForLibvirt(l, s).Name)
}

func nbdURI(s *status.Status, export string) string {
	return pages.NBDURI(options.Reachable(s.NBDPortals[0]), export, s.NBDTLS)
}
