package main

import (
	"context"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
)

// changes are the sources of changes for a daemon.
type changes struct {
	hangups     <-chan struct{} // requests to read the configuration again
	config      func() (*config, error)
	credentials func() (chap.Config, error)
	setLevel    func(zapcore.Level)
}

// follow applies changes until ctx ends. It watches the credential files and the handovers in the
// pod's annotations. It reads the configuration again on request.
func (s *served) follow(ctx context.Context) {
	var looks <-chan time.Time
	var r *rotation
	if s.cfg.CHAP.Enabled() && s.cfg.chapFiles {
		r = newRotation(s.changes.credentials, s.daemon.ReplaceCredentials, s.cfg.CHAP, s.log)
		tick := time.NewTicker(rotationPoll)
		defer tick.Stop()
		looks = tick.C
	}
	var requested <-chan time.Time
	w := handoverRequests{path: s.cfg.annotations, want: s.daemon.WantHandover}
	if w.path != "" {
		w.look(ctx)
		tick := time.NewTicker(handoverPoll)
		defer tick.Stop()
		requested = tick.C
	}
	inForce := s.cfg.values
	for {
		select {
		case <-ctx.Done():
			return
		case <-looks:
			r.look()
		case <-requested:
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

const (
	// handoverAnnotation asks for a step of a handover. Only users who may change the pod can set
	// it.
	handoverAnnotation = "disk.kubevirt.io/handover"
	// handoverPoll is the time between two reads of the annotations. A live migration waits that
	// long.
	handoverPoll = time.Second
)

// handoverRequests carries out the handovers that an annotation of the pod requests.
type handoverRequests struct {
	path string // of the downward API's file
	want func(ctx context.Context, asked string) (done bool)
	done string // the last request that was done
}

// look carries out the request in the annotation, once. If the file cannot be read, for example
// while it is being replaced, look does nothing.
func (w *handoverRequests) look(ctx context.Context) {
	text, err := osfile.ReadText(w.path)
	if err != nil {
		return
	}
	annotations, err := parseAnnotations(text)
	asked := annotations[handoverAnnotation]
	if err != nil || asked == w.done {
		return
	}
	w.done = ""
	if asked == "" || w.want(ctx, asked) {
		w.done = asked
	}
}

const (
	// rotationPoll is the time between two reads of the credential files. Comparing their content
	// finds every change. A watch on the files would miss a change in which Kubernetes replaces one
	// link in the chain of a mounted secret.
	rotationPoll = 2 * time.Second
	// rotationPause and rotationTries apply when a change is known to have happened.
	rotationPause = 10 * time.Millisecond
	rotationTries = 50
)

// rotation puts changed credentials into force. Only one goroutine uses it.
type rotation struct {
	read    func() (chap.Config, error)
	replace func(chap.Config) error
	log     *zap.Logger
	inForce chap.Config

	last seenCredentials // from the previous look
	told string          // what the log reports as wrong with the files; "": nothing
}

func newRotation(read func() (chap.Config, error), replace func(chap.Config) error,
	inForce chap.Config, log *zap.Logger) *rotation {
	return &rotation{read: read, replace: replace, log: log, inForce: inForce,
		last: seenCredentials{cfg: inForce}}
}

// seenCredentials are the credentials that one look found.
type seenCredentials struct {
	cfg     chap.Config
	problem string // "": none
}

func (s seenCredentials) same(o seenCredentials) bool {
	return s.problem == o.problem && s.cfg.Equal(o.cfg)
}

// look reads the files. Credentials take effect when two looks in a row have found the same. So a
// half-written file never takes effect, nor does the user of one version of a secret with the
// password of another. look reports whether both looks agreed.
func (r *rotation) look() (settled bool) {
	cfg, err := r.read()
	now := seenCredentials{cfg: cfg}
	if err != nil {
		now.problem = err.Error()
	}
	settled = now.same(r.last)
	r.last = now
	if settled {
		r.use(now)
	}
	return settled
}

// lookNow reads the files after a change, and waits briefly while they are being written.
func (r *rotation) lookNow() {
	for try := 0; !r.look() && try < rotationTries; try++ {
		time.Sleep(rotationPause)
	}
}

func (r *rotation) use(now seenCredentials) {
	if now.problem == "" && !now.cfg.Equal(r.inForce) {
		if err := r.replace(now.cfg); err != nil {
			now.problem = err.Error()
		} else {
			r.inForce, r.told = now.cfg, ""
			r.log.Info("the credentials have changed: new logins need the new ones, and sessions " +
				"go on")
			return
		}
	}
	if now.problem == r.told {
		return
	}
	r.told = now.problem
	if now.problem == "" {
		r.log.Info("the credential files can be used again and have not changed")
		return
	}
	r.log.Warn("the credential files cannot be used: the earlier credentials stay in force",
		zap.String("problem", now.problem))
}
