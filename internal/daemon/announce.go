package daemon

import (
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/status"
)

// announce logs what is served and how to log in.
func (d *Daemon) announce() {
	s := d.Status()
	d.disks.Announce()
	command, user := "iscsi-ls", ""
	if d.opt.CHAP.Enabled() {
		command, user = "LIBISCSI_CHAP_PASSWORD=... iscsi-ls", "USERNAME@"
	}
	if len(s.Portals) == 0 {
		d.log.Info("ready", zap.Strings("nbd_portals", s.NBDPortals),
			zap.Duration("after", time.Since(d.started)),
			zap.String("try", "nbdinfo --list "+NBDURI(&s, s.NBDPortals[0], "")))
		return
	}
	try := fmt.Sprintf("%s -s iscsi://%s%s", command, user, options.Reachable(s.Portals[0]))
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

// NBDURI is the URI of an export at a portal of NBD, for a client on this machine.
func NBDURI(s *status.Status, portal, export string) string {
	return pages.NBDURI(options.Reachable(portal), export, s.NBDTLS)
}
