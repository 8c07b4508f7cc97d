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

// changeDisk gives a disk what of its new settings can change while it is served, each by itself, and
// names what did and what did not.
func (d *daemon) changeDisk(s *servedDisk, next diskSettings, luns lunAccess) (
	done, later []string) {
	now := d.state.settings(s)
	keys := changedKeys(now, next)
	if next.readOnly {
		slices.Reverse(keys) // so that nobody writes who gets access only by the other change
	}
	for _, key := range keys {
		name, to := s.name+": "+key, now
		switch key {
		case keyAccessMode:
			to.accessMode = next.accessMode
		case keyReadOnly:
			to.readOnly = next.readOnly
		default:
			later = append(later, name)
			continue
		}
		if err := luns.SetAccess(s.lun, to.accessMode, to.readOnly); err != nil {
			later = append(later, name+" ("+err.Error()+")")
			continue
		}
		d.state.changeAccess(s, to.accessMode, to.readOnly)
		done, now = append(done, name), to
	}
	return done, later
}
