package main

import (
	"context"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/cli/settings"
)

// changes are the ways in which a daemon learns of changes.
type changes struct {
	hangups     <-chan struct{} // asks to read the configuration again
	config      func() (*config, error)
	credentials func() (chap.Config, error)
	setLevel    func(zapcore.Level)
}

// follow applies changes until ctx ends. It follows the credential files and the handovers that the
// pod's annotations ask for. It reads the configuration again on request.
func (s *served) follow(ctx context.Context) {
	var looks <-chan time.Time
	var r *rotation
	if s.cfg.CHAP.Enabled() && s.cfg.chapFiles {
		r = newRotation(s.changes.credentials, s.daemon.ReplaceCredentials, s.cfg.CHAP, s.log)
		tick := time.NewTicker(rotationPoll)
		defer tick.Stop()
		looks = tick.C
	}
	var wished <-chan time.Time
	w := wishes{path: s.cfg.annotations, want: s.daemon.WantHandover}
	if w.path != "" {
		w.look(ctx)
		tick := time.NewTicker(wishPoll)
		defer tick.Stop()
		wished = tick.C
	}
	inForce := s.cfg.values
	for {
		select {
		case <-ctx.Done():
			return
		case <-looks:
			r.look()
		case <-wished:
			w.look(ctx)
		case <-s.changes.hangups:
			inForce = s.reload(r, inForce)
		}
	}
}

// reload reads the configuration again and applies what can change while disks are served. One log
// line names the settings that need a restart. It appears at every reload, until the daemon
// restarts or the settings are as before. It returns the settings in force.
func (s *served) reload(r *rotation, inForce map[string]string) map[string]string {
	next, err := s.changes.config()
	var ofDisks, ofDisksLater []string
	if err == nil {
		ofDisks, ofDisksLater, err = s.daemon.Reload(next.Settings)
	}
	if err != nil {
		s.log.Error("the configuration was read again and cannot be used: nothing has changed",
			zap.Error(err))
		return inForce
	}
	if r != nil {
		r.lookNow()
	}
	var done, later []string
	values := map[string]string{}
	for _, row := range next.settings() {
		now, before := next.values[row.Key], inForce[row.Key]
		values[row.Key] = before
		switch {
		case now == before:
		case row.Key == keyLogLevel:
			s.changes.setLevel(next.log.Level)
			done = append(done, row.Key)
			values[row.Key] = now
		case row.Scope == settings.ForDaemon: // the daemon compares the others, disk by disk
			later = append(later, row.Key)
		}
	}
	done, later = append(done, ofDisks...), append(later, ofDisksLater...)
	s.log.Info("the configuration was read again", zap.Strings("changed", done))
	if len(later) > 0 {
		s.log.Warn("some changed settings take effect only after a restart",
			zap.Strings("settings", later))
	}
	return values
}
