package nbd

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
)

// inheritance is a call of Remote.Inherit.
type inheritance struct {
	ctx  context.Context
	done chan error
}

// Inherit makes the disk an heir's: the client is the target of a live migration. Another client of
// the same name, which has the disk, keeps it until the first write here. Then the server refuses
// it for good, also when it repeats what it has written. Reads are answered before. It is an error
// if the server does not do that, or cannot be reached before ctx ends. A second call does nothing.
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

// asHeir connects as an heir, and answers whoever has asked for it. It returns nil if the
// connection stays.
func (r *Remote) asHeir(asked inheritance) *link {
	if r.heir {
		asked.done <- nil
		return nil
	}
	ctx, stop := context.WithCancel(r.ctx)
	defer stop()
	defer context.AfterFunc(asked.ctx, stop)()
	r.heir = true
	l, err := r.again(ctx)
	if err != nil {
		r.heir = false
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
