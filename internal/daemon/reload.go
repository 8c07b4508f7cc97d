package daemon

import (
	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/daemon/options"
)

// Reload puts new settings of disks into force, see served.Disks.Reload.
func (d *Daemon) Reload(next options.Settings) (done, later []string, err error) {
	if err := d.running(); err != nil {
		return nil, nil, err
	}
	return d.disks.Reload(next)
}

// ReplaceCredentials sets the credentials for new logins. Sessions go on. It cannot turn CHAP on or
// off.
func (d *Daemon) ReplaceCredentials(c chap.Config) error {
	if d.auth == nil {
		return errNoCHAP
	}
	return d.auth.Replace(c)
}
