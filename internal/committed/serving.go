package committed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/status"
)

// OpenOfDaemon opens a snapshot of a disk of a running daemon. Without a name, it takes a snapshot,
// which is deleted when the disk is closed. explain makes a message for a person of an error.
func OpenOfDaemon(ctx context.Context, daemon control.Client, name, snapshot string,
	explain func(error) error) (*Disk, error) {
	end := func() error { return nil }
	own := snapshot == ""
	if own {
		snapshot = "commit-" + time.Now().UTC().Format("20060102T150405.000Z")
		if err := daemon.OwnSnapshot(ctx, name, snapshot); err != nil {
			return nil, explain(err)
		}
		// Also after an interruption: no other program may know of the snapshot.
		end = func() error {
			err := forget(context.WithoutCancel(ctx), daemon, name, snapshot)
			if err != nil {
				err = fmt.Errorf("the snapshot %q of %q is left, delete it: %w", snapshot, name,
					explain(err))
			}
			return err
		}
	}
	r, err := daemon.Reader(ctx, name, snapshot, explain)
	if err != nil {
		return nil, errors.Join(err, end())
	}
	d := &Disk{Name: r.Disk, Reference: r.Reference, content: r, files: r.Image,
		snapshots: r.Committed, close: func() error { return errors.Join(r.Close(), end()) }}
	if !own {
		d.stored = func(ctx context.Context, image string) error {
			_, err := daemon.Snapshot(ctx, status.SnapshotRequest{Image: image,
				Action: status.SnapshotCommitted, Disks: []string{name}, Name: snapshot,
				Identity: r.Identity})
			return explain(err)
		}
	}
	return d, nil
}

// forget deletes a snapshot, unless somebody else has. After an error, the last reads of it may
// still be under way.
func forget(ctx context.Context, daemon control.Client, name, snapshot string) error {
	for try := 1; ; try++ {
		_, err := daemon.Snapshot(ctx, status.SnapshotRequest{Action: status.SnapshotDelete,
			Disks: []string{name}, Name: snapshot})
		if !errors.As(err, new(*control.RefusedError)) || try == 20 {
			return err
		}
		all, listing := daemon.Snapshots(ctx, name)
		if listing == nil && !slices.ContainsFunc(all, func(s status.Snapshot) bool {
			return s.Name == snapshot
		}) {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// OpenExport opens an export of a daemon like any other client.
func OpenExport(ctx context.Context, address, export string) (*Disk, error) {
	r, err := nbd.OpenRemote(ctx, nbd.RemoteOptions{Address: address, Export: export, Once: true})
	if err != nil {
		return nil, err
	}
	return &Disk{Name: export, content: exported{r}, close: r.Close}, nil
}

// exported is an export that has no other writer while it is open. So it has extents.
type exported struct{ *nbd.Remote }

var _ disk.Extenter = exported{}

func (e exported) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	return e.Allocated(ctx, off, length)
}
