package main

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/target"
)

// changes is how a daemon learns what has changed around it. The zero value: nothing does.
type changes struct {
	hangups     <-chan struct{} // the configuration is to be read again
	config      func() (*config, error)
	credentials func() (chap.Config, error)
	setLevel    func(zapcore.Level)
}

// follow keeps up with the credential files, and with the configuration when it is told to, until
// ctx ends.
func (d *daemon) follow(ctx context.Context, luns lunAccess) {
	var looks <-chan time.Time
	var r *rotation
	if d.auth != nil && d.cfg.chapFiles && d.changes.credentials != nil {
		r = newRotation(d.changes.credentials, d.auth.Replace, d.cfg.chap, d.log)
		tick := time.NewTicker(rotationPoll)
		defer tick.Stop()
		looks = tick.C
	}
	inForce := d.cfg.values
	for {
		select {
		case <-ctx.Done():
			return
		case <-looks:
			r.look()
		case <-d.changes.hangups:
			inForce = d.reload(r, luns, inForce)
		}
	}
}

// lunAccess is what of the server a new configuration is for.
type lunAccess interface {
	SetAccess(lun uint16, mode target.AccessMode, readOnly bool) error
}

// reload reads the configuration again and puts into force what can change while disks are served.
// What cannot is named by one line of the log, at every reload, until the daemon is restarted or
// the setting is as it was. It returns the settings in force.
func (d *daemon) reload(r *rotation, luns lunAccess, inForce map[string]string) map[string]string {
	disks := d.state.servedDisks()
	next, err := d.changes.config()
	var wanted []diskSettings
	if err == nil {
		wanted, err = next.settle(disks)
	}
	if err != nil {
		d.log.Error("the configuration was read again and cannot be used: nothing has changed",
			zap.Error(err))
		return inForce
	}
	if r != nil {
		r.lookNow()
	}
	var done, later []string
	values := map[string]string{}
	for _, s := range settings {
		now, before := next.values[s.key], inForce[s.key]
		values[s.key] = before
		switch {
		case now == before:
		case s.key == keyLogLevel:
			d.changes.setLevel(next.log.level)
			done = append(done, s.key)
			values[s.key] = now
		case !slices.Contains(commonDiskKeys, s.key): // those are dealt with disk by disk
			later = append(later, s.key)
		}
	}
	for i, s := range disks {
		changed, waits := d.changeDisk(s, wanted[i], luns)
		done, later = append(done, changed...), append(later, waits...)
	}
	d.log.Info("the configuration was read again", zap.Strings("changed", done))
	if len(later) > 0 {
		d.log.Warn("settings have changed that count after a restart only",
			zap.Strings("settings", later))
	}
	return values
}

// changeDisk gives a disk what of its new settings can change while it is served, and names what
// did and what did not.
func (d *daemon) changeDisk(s *servedDisk, next diskSettings, luns lunAccess) (
	done, later []string) {
	name := func(key string) string { return s.name + ": " + key }
	var access []string
	for _, key := range changedKeys(d.state.settings(s), next) {
		if key == keyAccessMode || key == keyReadOnly {
			access = append(access, name(key))
			continue
		}
		later = append(later, name(key))
	}
	if len(access) == 0 {
		return nil, later
	}
	if err := luns.SetAccess(s.lun, next.accessMode, next.readOnly); err != nil {
		return nil, append(later, access[0]+" ("+err.Error()+")")
	}
	d.state.changeAccess(s, next.accessMode, next.readOnly)
	return access, later
}
