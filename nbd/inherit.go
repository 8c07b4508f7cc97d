package nbd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/disk/disk"
)

// inheritance is a call of Remote.Inherit.
type inheritance struct {
	ctx  context.Context
	done chan error
}

// Inherit tells the server that the client is the target of a live migration. Another client of the
// same name, the source, keeps the disk until the first write here. From then on the server refuses
// the source for good, also when it repeats its writes. Reads are answered from the beginning.
// Inherit fails if the server cannot do that, or cannot be reached before ctx ends. A second call
// does nothing.
func (r *Remote) Inherit(ctx context.Context) error {
	asked := inheritance{ctx, make(chan error, 1)}
	for {
		r.mu.Lock()
		failed, changed := r.failed, r.changed
		r.mu.Unlock()
		if failed != nil {
			return failed
		}
		select {
		case r.inherit <- asked:
			return <-asked.done
		case <-changed:
		case <-ctx.Done():
			return r.explain(fmt.Errorf("the server cannot be reached: %w", context.Cause(ctx)))
		}
	}
}

// asTarget connects again as the target of a migration, and answers the call of Inherit. It returns
// nil if the former connection stays.
func (r *Remote) asTarget(asked inheritance) *link {
	if r.migrationTarget {
		asked.done <- nil
		return nil
	}
	ctx, stop := context.WithCancel(r.ctx)
	defer stop()
	defer context.AfterFunc(asked.ctx, stop)()
	r.migrationTarget = true
	l, err := r.redialOnce(ctx)
	for Unreachable(err) && ctx.Err() == nil { // the server may be restarting
		r.noteWhy(err)
		select {
		case <-ctx.Done():
		case <-time.After(firstRedial):
			l, err = r.redialOnce(ctx)
		}
	}
	if err != nil {
		r.migrationTarget = false
		if !errors.Is(err, disk.ErrFailed) {
			err = r.explain(err)
		}
		asked.done <- err
		return nil
	}
	r.set(l, nil)
	asked.done <- nil
	return l
}
