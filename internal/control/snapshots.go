package control

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/status"
)

// Snapshots are the methods of a daemon's disks for snapshots. A disk is named by its name or its
// LUN. The answers are sentences for a person.
type Snapshots interface {
	ListSnapshots(disk string) ([]status.Snapshot, error)
	ChangeSnapshots(ctx context.Context, req status.SnapshotRequest) (done string, err error)
	// OpenContent opens a snapshot of a disk. It stays at least until it is closed.
	OpenContent(disk, snapshot string) (*Content, error)
}

// snapshotTime is how long a request for a snapshot may take. It is shorter than the client's
// timeout, so that the client learns the reason.
const snapshotTime = timeout - 2*time.Second

// snapshotControl answers the requests about snapshots.
type snapshotControl struct {
	disks Snapshots
	log   *zap.Logger
}

func (c *snapshotControl) list(w http.ResponseWriter, r *http.Request, _ uint32) {
	all, err := c.disks.ListSnapshots(r.URL.Query().Get("disk"))
	if err != nil {
		answer(w, http.StatusConflict, status.Refusal{Error: err.Error()})
		return
	}
	answer(w, http.StatusOK, status.SnapshotsAnswer{Snapshots: all})
}

func (c *snapshotControl) change(w http.ResponseWriter, r *http.Request, user uint32) {
	var req status.SnapshotRequest
	if !understand(w, r, &req) {
		return
	}
	// net/http cancels the context of a request at the server's ReadTimeout.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), snapshotTime)
	defer cancel()
	done, err := c.do(ctx, req)
	if err != nil {
		answer(w, http.StatusConflict, status.Refusal{Error: err.Error()})
		return
	}
	c.log.Info("snapshot", zap.String("action", string(req.Action)),
		zap.Strings("disks", req.Disks), zap.String("name", req.Name), zap.Uint32("by_user", user))
	answer(w, http.StatusOK, status.SnapshotAnswer{Done: done})
}

func (c *snapshotControl) do(ctx context.Context, req status.SnapshotRequest) (string, error) {
	switch {
	case len(req.Disks) == 0:
		return "", fmt.Errorf("name a disk")
	case len(req.Disks) > 1 && req.Action != status.SnapshotCreate:
		return "", fmt.Errorf("%s takes one disk, not %d", req.Action, len(req.Disks))
	}
	return c.disks.ChangeSnapshots(ctx, req)
}
