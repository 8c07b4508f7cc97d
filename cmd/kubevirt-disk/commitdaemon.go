package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

// openOfDaemon opens a snapshot of a disk of a running daemon. Without one, it takes a snapshot,
// which goes when the disk is closed.
func (c *committing) openOfDaemon(ctx context.Context, name, snapshot string) (*committed, error) {
	socket, err := c.ask.socket(nil)
	if err != nil {
		return nil, err
	}
	explain := func(err error) error {
		if err == nil || errors.Is(err, disk.ErrNotNow) || errors.Is(err, context.Canceled) {
			return err
		}
		return explainControl(err, socket, pendingChange)
	}
	daemon := daemonAt(socket)
	end := func() error { return nil }
	own := snapshot == ""
	if own {
		snapshot = "commit-" + time.Now().UTC().Format("20060102T150405.000Z")
		change := func(ctx context.Context, action status.SnapshotAction) error {
			_, err := daemon.Snapshot(ctx, status.SnapshotRequest{Action: action,
				Disks: []string{name}, Name: snapshot})
			return err
		}
		if err := change(ctx, status.SnapshotCreate); err != nil {
			return nil, explain(err)
		}
		end = func() error {
			// Also after an interruption: nobody else knows of it.
			err := change(context.WithoutCancel(ctx), status.SnapshotDelete)
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
	d := &committed{name: r.Disk, content: r, files: r.Image, snapshots: r.Committed,
		close: func() error { return errors.Join(r.Close(), end()) }}
	if c.onto.Image == "" && !c.flat {
		if c.onto.Image = r.Reference; r.Reference == "" {
			return nil, errors.Join(c.ontoOrFlat(fmt.Sprintf("%q was not made of an image in a "+
				"registry, as far as the daemon knows: ", r.Disk)), d.close())
		}
	}
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
