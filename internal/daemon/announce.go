package daemon

import (
	"fmt"
	"net"
	"slices"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/pages"
)

// announce logs what is served and how to log in.
func (d *Daemon) announce() {
	s := d.Status()
	for _, l := range s.LUNs {
		d.announceLUN(l)
	}
	command, user := "iscsi-ls", ""
	if d.opt.CHAP.Enabled() {
		command, user = "LIBISCSI_CHAP_PASSWORD=... iscsi-ls", "USERNAME@"
	}
	try := fmt.Sprintf("%s -s iscsi://%s%s", command, user, Reachable(s.Portals[0]))
	d.log.Info("ready", zap.String("target", s.TargetName), zap.Strings("portals", s.Portals),
		zap.String("authentication", s.Authentication),
		zap.Duration("after", time.Since(d.started)), zap.String("try", try))
	remote := func(a Address) bool { return !a.Loopback() }
	switch {
	case d.opt.CHAP.Enabled():
	case slices.ContainsFunc(d.opt.Portals, remote):
		d.log.Warn("there is no CHAP: whoever reaches a portal can use the disks",
			zap.Strings("portals", s.Portals))
	default:
		d.log.Warn("there is no CHAP, so only this machine, or this container or pod, can use the "+
			"disks: "+d.names.of(SettingCredentials).String()+" let others log in",
			zap.Strings("portals", s.Portals))
	}
}

func (d *Daemon) announceLUN(l pages.LUNStatus) {
	d.log.Info("serving a LUN", zap.Uint16("lun", l.LUN), zap.String("image", l.Image),
		zap.String("format", l.Format), zap.Int64("size_bytes", l.SizeBytes),
		zap.String("copy_mode", l.CopyMode), zap.String("access_mode", l.AccessMode),
		zap.String("serial", l.Serial), zap.String("naa", l.NAA), usageTypeField(l.UsageType))
}

func usageTypeField(name string) zap.Field {
	if name == "" {
		return zap.Skip()
	}
	return zap.String("usage_type", name)
}

// Reachable replaces an address that stands for every address by one that a client on this machine
// can use.
func Reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	switch host {
	case "0.0.0.0", "":
		host = "127.0.0.1"
	case "::":
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}
