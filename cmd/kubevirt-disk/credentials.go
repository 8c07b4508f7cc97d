package main

import (
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
)

const (
	// rotationPoll is how often the credential files are read. Comparing their content works
	// however they change. A watch on the files would miss it when Kubernetes replaces one link in
	// the chain of a mounted secret.
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
	told string          // what the log says is wrong with the files; "": nothing
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
