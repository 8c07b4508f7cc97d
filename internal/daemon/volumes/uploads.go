package volumes

import (
	"context"
	"net/http"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/server"
	"kubevirt.io/disk/volume/upload"
)

// newUploads makes the handler that receives the data of volumes.
func (v *Volumes) newUploads() *upload.Handler {
	return upload.New(upload.Options{
		Fill: func(ctx context.Context, name string, mayMake bool) (upload.Volume, bool, error) {
			f, made, err := v.manager.Fill(ctx, name, mayMake)
			if err != nil {
				return nil, false, err
			}
			return f, made, nil
		},
		Done: func(w http.ResponseWriter, r *http.Request, name string) {
			v.server.Answer(w, r, http.StatusCreated, name)
		},
		Refuse: server.Refuse,
		Log:    v.log,

		UnpackMemory: v.opt.UnpackMemory,
	})
}

// Uploads counts uploads, for the metrics. nil: there are no volumes.
func (v *Volumes) Uploads() *metrics.Uploads {
	if v == nil {
		return nil
	}
	t := v.uploads.Totals()
	return &metrics.Uploads{Active: t.Active, Bytes: t.Bytes, Completed: t.Completed,
		Failed: t.Failed}
}

// expireEvery is how often to look for interrupted uploads.
const expireEvery = 10 * time.Minute

// expireUploads ends uploads that are not continued, until the daemon stops.
func (v *Volumes) expireUploads() {
	tick := time.NewTicker(expireEvery)
	defer tick.Stop()
	for {
		select {
		case <-v.disks.Stopping.Done():
			return
		case <-tick.C:
		}
		if err := v.uploads.Expire(v.disks.Stopping, v.awaiting()); err != nil {
			v.opt.Log.Warn("the data of an interrupted upload could not be removed", zap.Error(err))
		}
	}
}

func (v *Volumes) awaiting() (names []string) {
	for _, one := range v.manager.List() {
		if one.State == api.StateAwaiting {
			names = append(names, one.Record.Name)
		}
	}
	return names
}

// recoverUploads removes the data of uploads that an earlier run did not finish.
func (v *Volumes) recoverUploads(ctx context.Context) {
	if err := v.uploads.Recover(ctx, v.awaiting()); err != nil {
		v.opt.Log.Warn("the remains of an upload could not be removed: the next upload to its "+
			"volume removes them", zap.Error(err))
	}
}
