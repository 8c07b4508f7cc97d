package nbd

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
)

const (
	// firstPause and lastPause are the waits between attempts at a flush that the server refuses
	// for now.
	firstPause = 50 * time.Millisecond
	lastPause  = time.Second
)

// flush makes acknowledged changes durable. It waits while the server is away or refuses a flush
// for now, and with forRoom also while its storage is full. After disk.ErrNoSpace all changes are
// still kept. Any other error is for good.
func (r *Remote) flush(ctx context.Context, forRoom bool) error {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		if r.kept.empty() { // so a stop does not wait for a server that is away
			r.mu.Lock()
			defer r.mu.Unlock()
			if errors.Is(r.failed, errSuperseded) { // nothing is lost
				return nil
			}
			return r.failed
		}
		l, err := r.current(ctx)
		if err != nil {
			return err
		}
		switch err = r.flushOn(ctx, l); {
		case errors.Is(err, errLinkLost):
			r.lost(l)
		case errors.Is(err, disk.ErrNotNow), forRoom && errors.Is(err, disk.ErrNoSpace):
			r.noteWhy(err)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return err
			}
		default:
			return err
		}
	}
}

// flushOn makes the server flush what it has acknowledged on one connection.
func (r *Remote) flushOn(ctx context.Context, l *link) error {
	mark := r.kept.mark()
	c := r.free.take(cmdFlush, 0, 0, nil)
	defer r.free.putBack(c)
	err := l.do(ctx, c)
	if err == nil {
		r.kept.drop(mark)
		return nil
	}
	if err = r.diskError(c, err); errors.Is(err, disk.ErrFailed) {
		r.fail(err)
	}
	return err
}

// flushSoon makes acknowledged changes durable in the background, so that there is room for others.
func (r *Remote) flushSoon() {
	if r.flushing.Swap(true) {
		return
	}
	r.wg.Go(func() {
		err := r.flush(r.ctx, true)
		if err != nil && r.ctx.Err() == nil {
			r.log.Error("the disk has failed", zap.Error(err))
		}
		r.flushing.Store(false)
		if err == nil && r.kept.wanted() { // others asked during this flush
			r.flushSoon()
		}
	})
}
