package control

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/status"
)

// Snapshots are the methods of a daemon's disks for snapshots. A disk is named by its name or its
// LUN. The answers are sentences for a person.
type Snapshots interface {
	ListSnapshots(disk string) ([]status.Snapshot, error)
	ChangeSnapshots(ctx context.Context, req status.SnapshotRequest) (done string, err error)
	// OpenContent opens a snapshot of a disk. The snapshot exists at least until it is closed.
	OpenContent(disk, snapshot string) (*Content, error)
}

// snapshotTime is how long a request for a snapshot may take. It is shorter than the client's
// timeout, so that the client gets the reason.
const snapshotTime = timeout - 2*time.Second

// whileAlive is the query for a snapshot that is deleted when the requesting process ends.
const whileAlive = "while-alive"

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
	peer, ok := r.Context().Value(peerKey{}).(*unix.Ucred)
	if ok && req.Action == status.SnapshotCreate && r.URL.Query().Has(whileAlive) {
		// Before the answer, after which the process may end and its number be reused.
		fd, err := unix.PidfdOpen(int(peer.Pid), 0)
		if err == nil || err == unix.ESRCH { // otherwise it is in another container
			go c.deleteAfter(fd, req, c.createdAt(req))
		}
	}
	answer(w, http.StatusOK, status.SnapshotAnswer{Done: done})
}

// deleteAfter deletes a snapshot when a process has ended, unless the process has done so. created
// is when it was taken: another one may have its name by then.
func (c *snapshotControl) deleteAfter(process int, req status.SnapshotRequest, created time.Time) {
	defer unix.Close(process)
	for err := error(unix.EINTR); process >= 0 && err == unix.EINTR; {
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, -1)
	}
	req.Action = status.SnapshotDelete
	for range 10 { // the process's last read may still be under way
		if !c.createdAt(req).Equal(created) {
			return
		}
		if _, err := c.do(context.Background(), req); err == nil {
			c.log.Info("a snapshot is deleted, because the process that had made it for itself "+
				"has ended", zap.Strings("disks", req.Disks), zap.String("name", req.Name))
			return
		}
		time.Sleep(time.Second)
	}
}

// createdAt is when the snapshot of a request was taken; zero: there is none.
func (c *snapshotControl) createdAt(req status.SnapshotRequest) time.Time {
	all, _ := c.disks.ListSnapshots(req.Disks[0])
	for _, s := range all {
		if s.Name == req.Name {
			return s.Created
		}
	}
	return time.Time{}
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
