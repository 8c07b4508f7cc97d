package daemon

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/target"
)

// Add serves one more disk and returns its LUN: the LUN in its settings, or the lowest free one. It
// returns when initiators can use the disk; in mode clone, the image is still being copied then.
// The daemon owns the image from now on, even after an error.
//
// Call Add only when every LUN can be used (Ready). Reload does not change an added disk, and the
// next start does not add it again. That start removes an ephemeral disk, unless its image is then
// in the directory of images.
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
	s, err := d.prepare(ctx, disk)
	if err != nil {
		return 0, err
	}
	if err = d.checkIdentities(d.disks.all()); err == nil {
		err = d.expose(srv, s)
	}
	if err != nil {
		return 0, d.orStopping(errors.Join(err, d.abandon(s)))
	}
	d.measure()
	d.announceLUN(d.disks.statusOf(s))
	return s.lun, nil
}

// prepare opens one more disk, which nobody can use yet. The daemon owns the image from now on,
// even after an error.
func (d *Daemon) prepare(ctx context.Context, disk Disk) (*servedDisk, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.stopping, cancel)()
	_, err := d.homeOf(disk.Name, disk.DiskSettings, "")
	var added []*servedDisk
	if err == nil {
		added, err = d.disks.add(disk)
	}
	if err != nil {
		closeImages(disk.Image)
		if disk.after != nil {
			err = errors.Join(err, disk.after())
		}
		return nil, err
	}
	s := added[0]
	if err := d.open(ctx, s); err != nil {
		return nil, d.orStopping(errors.Join(d.explainDescriptors(err), d.abandon(s)))
	}
	return s, nil
}

// orStopping replaces an error that is due to the end of the daemon.
func (d *Daemon) orStopping(err error) error {
	if d.stopping.Err() != nil {
		return fmt.Errorf("%w: %w", errStopping, err)
	}
	return err
}

// abandon closes a disk that was prepared and is not served.
func (d *Daemon) abandon(s *servedDisk) error {
	d.disks.drop(s)
	return d.close(s)
}

// expose makes a LUN of a disk that was prepared.
func (d *Daemon) expose(srv *target.Server, s *servedDisk) error {
	if err := srv.AddLUN(d.lun(s)); err != nil {
		return d.explainDescriptors(err)
	}
	d.disks.serves(s)
	d.mu.Lock()
	control := d.control
	d.mu.Unlock()
	control.Added(s.lun)
	return nil
}

// Remove stops serving a disk. Commands to it then end with LOGICAL UNIT NOT SUPPORTED; commands to
// other LUNs do not wait. If Remove returns nil, the disk is flushed and closed, and its data stays
// in its directory.
//
// A command that hangs in the disk keeps it open. If ctx ends before the command does, the error
// says so, and the disk is closed when the command returns.
func (d *Daemon) Remove(ctx context.Context, lun uint16) error {
	return d.remove(ctx, lun, d.flush)
}

// remove is Remove. It calls last before it closes the disk.
func (d *Daemon) remove(ctx context.Context, lun uint16, last func(*servedDisk) error) error {
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
		return errors.Join(err, d.abandon(s)) // the target does not have it, so nobody uses it
	}
	d.gone(s)
	d.disks.drop(s)
	closed := make(chan error, 1)
	go func() {
		defer d.disks.changes.Done()
		<-released
		closed <- errors.Join(last(s), d.close(s))
	}()
	select {
	case err := <-closed:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%v is removed, and its disk is closed when the commands that hang in "+
			"it have returned: %w", s, ctx.Err())
	}
}

// withdraw stops serving a disk that no initiator uses, and otherwise returns a
// *target.InUseError. The disk stays open. Nothing uses it when released is closed.
func (d *Daemon) withdraw(s *servedDisk) (released <-chan struct{}, err error) {
	srv, err := d.serving()
	if err != nil {
		return nil, err
	}
	if err := d.disks.begin(); err != nil {
		return nil, err
	}
	defer d.disks.changes.Done()
	if released, err = srv.RemoveUnusedLUN(s.lun); err != nil {
		return nil, err
	}
	d.disks.withdrawn(s)
	d.gone(s)
	return released, nil
}

// gone logs that the target no longer has a LUN.
func (d *Daemon) gone(s *servedDisk) {
	d.control.Removed(s.lun)
	d.measure()
	d.log.Info("removed a LUN", zap.Uint16("lun", s.lun), zap.String("image", s.name))
}

// statusOf returns the /status entry of a disk.
func (t *table) statusOf(s *servedDisk) pages.LUNStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	return s.statusLocked()
}
