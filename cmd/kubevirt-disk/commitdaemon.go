package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/status"
)

// openOfDaemon opens a snapshot of a disk of a running daemon. Without one, it takes a snapshot,
// which goes when the disk is closed.
func (c *committing) openOfDaemon(ctx context.Context, name, snapshot string) (*committed, error) {
	socket, err := c.ask.socket(c.cmd)
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
	r, err := daemon.Reader(ctx, name, snapshot)
	var origins []registry.Origin
	if err == nil && c.onto.Image == "" && !c.flat {
		if c.onto.Image = r.Reference; r.Reference == "" {
			err = c.ontoOrFlat(fmt.Sprintf("%q was not made of an image in a registry, as far as "+
				"the daemon knows: ", r.Disk))
		}
	}
	if err == nil && c.onto.Image != "" {
		origins, err = originsOf(ctx, r)
	}
	if err != nil {
		return nil, errors.Join(explain(err), end())
	}
	var stored func(context.Context, string) error
	if !own {
		stored = func(ctx context.Context, image string) error {
			_, err := daemon.Snapshot(ctx, status.SnapshotRequest{Image: image,
				Action: status.SnapshotCommitted, Disks: []string{name}, Name: snapshot,
				Identity: r.Identity})
			return explain(err)
		}
	}
	return &committed{name: r.Disk, origins: origins, stored: stored,
		source: func(context.Context) (image.Source, error) {
			return &daemonSnapshot{Reader: r, explain: explain}, nil
		},
		close: func() error {
			r.Close()
			return end()
		}}, nil
}

// originsOf asks what has changed since the image that the disk was made of, and since snapshots of
// which there are images.
func originsOf(ctx context.Context, r *control.Reader) ([]registry.Origin, error) {
	origin := func(digest, since string) (registry.Origin, error) {
		changed, err := r.Changed(ctx, since)
		return registry.Origin{Digest: digest,
			Changed: func(off, length int64) (bool, int64, error) {
				is, n := changed(off, length)
				return is, n, nil
			}}, err
	}
	all, err := committedOrigins(r.Disk, r.Committed, origin)
	if err == nil && len(r.Image) > 0 {
		var one registry.Origin
		one, err = origin("", "")
		one.Files = r.Image
		all = append(all, one)
	}
	return all, err
}

// daemonSnapshot is a snapshot of a daemon's disk as the bytes of an image.
type daemonSnapshot struct {
	*control.Reader
	explain func(error) error
}

func (s *daemonSnapshot) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	if rest := max(s.Size()-off, 0); int64(len(p)) > rest {
		p, err = p[:rest], io.EOF
	}
	n, readErr := s.Reader.ReadAt(ctx, p, off)
	if readErr != nil {
		return n, s.explain(readErr)
	}
	return n, err
}

func (s *daemonSnapshot) Size() int64 { return s.Content.Size }

func (s *daemonSnapshot) Extent(off, length int64) (disk.Extent, error) {
	stored, n := s.Stored(off, min(length, s.Size()-off))
	return disk.Extent{Length: n, Data: stored}, nil
}

func (s *daemonSnapshot) Identity() image.Identity { return image.Identity{} }
func (s *daemonSnapshot) Parallel() int            { return 1 }
func (s *daemonSnapshot) WillRead(int64, int64)    {}
func (s *daemonSnapshot) Check() error             { return nil }

// Close does nothing: the disk is opened more than once.
func (s *daemonSnapshot) Close() error { return nil }
