package daemon

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"kubevirt.io/disk/pages"
)

// Add serves one more disk, beside those that are there, and returns its LUN: the one of its
// settings, or the lowest that is free. It returns when initiators can use it; in mode clone its
// image is copied meanwhile. The image is the daemon's from now on, also after an error.
//
// Add is for when every LUN can be used (Ready). A disk that is added is not part of the settings
// that Reload takes up, and nobody adds it again at the next start: an ephemeral one is then
// forgotten, unless its image is in the directory of images by then.
func (d *Daemon) Add(ctx context.Context, disk Disk) (lun uint16, err error) {
	srv, err := d.serving()
	if err == nil {
		err = d.disks.begin()
	}
	if err != nil {
		closeImages(disk.Image)
		return 0, err
	}
	defer d.disks.changes.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.stopping, cancel)()
	added, err := d.disks.add(disk)
	if err != nil {
		closeImages(disk.Image)
		return 0, err
	}
	s := added[0]
	if err = d.open(ctx, s); err == nil {
		err = d.checkIdentities(d.disks.all())
	}
	if err == nil {
		err = srv.AddLUN(d.lun(s))
	}
	if err != nil {
		d.disks.drop(s)
		err = errors.Join(d.explainDescriptors(err), d.close(s))
		if d.stopping.Err() != nil {
			err = fmt.Errorf("%w: %w", errStopping, err)
		}
		return 0, err
	}
	d.disks.serves(s)
	d.control.Added(s.lun)
	d.measure()
	d.announceLUN(d.disks.statusOf(s))
	return s.lun, nil
}

// Remove stops serving a disk. Commands to it end with LOGICAL UNIT NOT SUPPORTED, and nobody
// else's wait for that. When Remove returns nil, the disk is flushed and closed, and what was
// written to it stays in its directory.
//
// A command that hangs in the disk keeps it open. When ctx ends before that, the error says so, and
// the disk is closed when the command returns.
func (d *Daemon) Remove(ctx context.Context, lun uint16) error {
	srv, err := d.serving()
	if err != nil {
		return err
	}
	if err := d.disks.begin(); err != nil {
		return err
	}
	s, err := d.disks.remove(lun)
	if err != nil {
		d.disks.changes.Done()
		return err
	}
	released, err := srv.RemoveLUN(lun)
	if err != nil {
		d.disks.changes.Done()
		return errors.Join(err, d.close(s)) // the target does not have it, so nobody uses it
	}
	d.control.Removed(lun)
	d.measure()
	d.log.Info("a LUN was removed", zap.Uint16("lun", lun), zap.String("image", s.name))
	closed := make(chan error, 1)
	go func() {
		defer d.disks.changes.Done()
		<-released
		closed <- errors.Join(d.flush(s), d.close(s))
	}()
	select {
	case err := <-closed:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%v is removed, and its disk is closed when the commands that hang in "+
			"it have returned: %w", s, ctx.Err())
	}
}

// statusOf is what /status shows of a disk.
func (t *table) statusOf(s *servedDisk) pages.LUNStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	return s.statusLocked()
}
