package served

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

// Status returns the parts of /status about LUNs and usage types. ready says that the daemon is
// ready. It waits for no disk for long.
func (d *Disks) Status(ready bool) (luns []status.LUN, types []status.UsageType) {
	luns = []status.LUN{}
	var gauges []*gauge[disk.Usage]
	for _, s := range d.table.all() {
		if s.LUN == 0 {
			continue
		}
		now, lun := s.look(), s.status()
		lun.Ready = ready && now.serving
		have := d.inUse.Holders(s.LUN)
		lun.Owner, lun.OpenTo, lun.Fenced = have.Owner, have.Guest, have.Fenced
		lun.Condition, lun.Troubles = d.condition(s, time.Now())
		luns, gauges = append(luns, lun), append(gauges, now.space)
	}
	spaces := readAll(time.After(gaugeWait), append(gauges, d.storages...))
	for i := range luns {
		if u := spaces[i]; u != nil {
			luns[i].Space = &status.Space{Used: u.Used, Free: u.Available}
		}
	}
	return luns, d.usageTypeStatus(luns, spaces[len(luns):])
}

// Failure returns nil unless a disk has failed for good, and a restart may help. It does not help
// if the disk is another server's: the machine would go on without the lost writes.
func (d *Disks) Failure() error {
	var all []error
	for _, s := range d.table.all() {
		if err := s.Failure(); err != nil && s.AlreadyOpen == nil {
			all = append(all, fmt.Errorf("%v: %w", s, err))
		}
	}
	return errors.Join(all...)
}

// Served returns the disks that are LUNs.
func (d *Disks) Served() []*Disk { return d.table.served() }

// Map returns the map of a disk's content for the page, or nil if it is not known now.
func (d *Disks) Map(lun uint16) *disk.Map {
	if s := d.table.find(lun); s != nil {
		return s.look().contents.now()
	}
	return nil
}

// Announce logs all LUNs.
func (d *Disks) Announce() {
	for _, s := range d.table.served() {
		d.log(s)
	}
}

func (d *Disks) log(s *Disk) {
	l := s.status()
	usageType := zap.Skip()
	if l.UsageType != "" {
		usageType = zap.String("usage_type", l.UsageType)
	}
	d.opt.Log.Info("serving a LUN", zap.Uint16("lun", l.LUN), zap.String("image", l.Image),
		zap.String("format", l.Format), zap.Int64("size_bytes", l.SizeBytes),
		zap.String("copy_mode", l.CopyMode), zap.String("access_mode", l.AccessMode),
		zap.String("serial", l.Serial), zap.String("naa", l.NAA), usageType)
}
