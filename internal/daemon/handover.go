package daemon

import (
	"context"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/status"
)

// WantHandover carries out the step of a handover that an annotation asks for, unless that is done
// already. The page /status shows the result. It is called again and again as long as the
// annotation exists.
func (d *Daemon) WantHandover(ctx context.Context, asked string) (done bool) {
	now := &status.HandoverOutcome{Asked: asked}
	var err error
	if now.Done, err = d.wantHandover(ctx, asked); err != nil {
		now.Error = err.Error()
	}
	d.mu.Lock()
	before := d.handover
	d.handover = now
	d.mu.Unlock()
	if err != nil && (before == nil || *before != *now) {
		d.log.Warn("a handover that an annotation of the pod asks for is not done yet",
			zap.String("asked", asked), zap.Error(err))
	}
	return err == nil
}

func (d *Daemon) wantHandover(ctx context.Context, asked string) (string, error) {
	req, err := control.ParseHandover(asked)
	if err != nil {
		return "", err
	}
	d.mu.Lock()
	c := d.control
	d.mu.Unlock()
	if c == nil {
		return "", errNotReady
	}
	return c.Want(ctx, req)
}
