package main

import (
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
)

const (
	// rotationPoll is how often the credential files are looked at. Their content is compared, so
	// that it makes no difference how they change: a mounted secret of Kubernetes is a chain of
	// links of which one is replaced, and no watch of the files would tell.
	rotationPoll = 2 * time.Second
	// rotationPause and rotationTries are how a change is looked at that is known to have happened.
	rotationPause = 10 * time.Millisecond
	rotationTries = 50
)

// rotation puts credentials into force that have changed. It belongs to one goroutine.
type rotation struct {
	read    func() (chap.Config, error)
	replace func(chap.Config) error
	log     *zap.Logger
	inForce chap.Config

	last seenCredentials // at the look before
	told string          // what the log says is wrong with the files; "": nothing
}

func newRotation(read func() (chap.Config, error), replace func(chap.Config) error,
	inForce chap.Config, log *zap.Logger) *rotation {
	return &rotation{read: read, replace: replace, log: log, inForce: inForce,
		last: seenCredentials{cfg: inForce}}
}

// seenCredentials are what one look has found.
type seenCredentials struct {
	cfg     chap.Config
	problem string // "": none
}

func (s seenCredentials) same(o seenCredentials) bool {
	return s.problem == o.problem && s.cfg.Equal(o.cfg)
}

// look reads the files. What it finds counts when the look before has found the same: so nobody
// sees half a file, nor the user of one version of a secret with the password of another. It says
// whether that was so.
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

// lookNow reads the files because they have changed, and waits a moment for what is being written.
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
		r.log.Info("the credential files are good again, and as they were before")
		return
	}
	r.log.Warn("the credential files cannot be used, so the credentials in force before stay so",
		zap.String("problem", now.problem))
}
