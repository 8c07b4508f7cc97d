// Package optionstest has options, and an image that they can name, for the tests of the packages
// that read them.
package optionstest

import (
	"net/netip"

	"kubevirt.io/disk/internal/daemon/options"
)

// Table has the settings that tests expect in messages.
func Table(o *options.Options) []options.Setting {
	return []options.Setting{
		named("disk-dir", "DISK_DIR", &o.Images.Dir),
		named("listen", "LISTEN", &o.Portals),
		named("port", "PORT", &o.Portals),
		named("metrics-listen", "METRICS_LISTEN", &o.Pages),
		named("ready-file", "READY_FILE", &o.ReadyFile),
		named("copy-mode", "COPY_MODE", &o.Settings.Disk.CopyMode),
		named("size", "SIZE", &o.Settings.Disk.Size),
		named("access-mode", "ACCESS_MODE", &o.Settings.Disk.AccessMode),
		{Key: "format", Field: &o.Settings.Disk.Format},
		{Key: "read-only", Field: &o.Settings.Disk.ReadOnly},
		{Key: "disks", Flag: `"disks" in the file`, Field: &o.Settings.Disks},
	}
}

func named(key, variable string, field any) options.Setting {
	return options.Setting{Key: key, Flag: "--" + key, Variable: variable, Field: field}
}

// Loopback returns an address with a free port of this machine.
func Loopback() options.Address {
	return options.Address{Addr: netip.AddrFrom4([4]byte{127, 0, 0, 1})}
}
