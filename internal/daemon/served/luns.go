package served

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/plan"
)

// Open opens one more disk, which nobody can use yet. Without a number, it gets the lowest free
// one. The image belongs to the disk from now on, even after an error. Reload does not change the
// disk, and the next start does not open it by itself.
func (d *Disks) Open(ctx context.Context, disk plan.Disk) (s *Disk, err error) {
	return d.openFrom(ctx, disk, origin{})
}

// openFrom is Open for a disk that comes from another one.
func (d *Disks) openFrom(ctx context.Context, disk plan.Disk, from origin) (s *Disk, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.Stopping, cancel)()
	if err = d.table.begin(); err == nil {
		defer d.table.changes.Done()
	}
	var added []*Disk
	if err == nil {
		added, err = d.table.addFrom(from, disk)
	}
	if err != nil {
		plan.CloseImages([]plan.Disk{disk})
		if disk.After != nil {
			err = errors.Join(err, disk.After())
		}
		return nil, err
	}
	if err = d.open(ctx, added[0]); err == nil {
		err = added[0].enlarge(disk.AtLeast)
	}
	if err != nil {
		return nil, d.orStopping(errors.Join(d.ExplainDescriptors(err), d.Abandon(added[0])))
	}
	return added[0], nil
}

// orStopping replaces an error that is caused by the end of the daemon.
func (d *Disks) orStopping(err error) error {
	if d.Stopping.Err() != nil {
		return fmt.Errorf("%w: %w", ErrStopping, err)
	}
	return err
}

// Abandon closes an opened disk that is no LUN.
func (d *Disks) Abandon(s *Disk) error {
	d.table.drop(s)
	return s.close()
}

// Serve makes an opened disk a LUN. With oneOfMany, the caller announces all of them by Announce.
func (d *Disks) Serve(s *Disk, oneOfMany bool) error {
	if err := d.table.begin(); err != nil {
		return err
	}
	defer d.table.changes.Done()
	s.turn.Lock()
	defer s.turn.Unlock()
	return d.serveLocked(s, oneOfMany)
}

func (d *Disks) serveLocked(s *Disk, oneOfMany bool) error {
	if _, err := s.stayingLocked(); err != nil {
		return err
	}
	if err := d.expose(s); err != nil {
		return d.orStopping(err)
	}
	if !oneOfMany {
		d.log(s)
	}
	return nil
}

func (d *Disks) expose(s *Disk) error {
	if err := d.inUse.Add(s.options()); err != nil {
		return d.ExplainDescriptors(err)
	}
	s.set(true)
	d.handovers.Added(s.LUN)
	return nil
}

// Grow enlarges a disk and tells initiators.
func (d *Disks) Grow(s *Disk, size int64) error {
	if err := d.table.begin(); err != nil {
		return err
	}
	defer d.table.changes.Done()
	s.turn.Lock()
	defer s.turn.Unlock()
	if _, err := s.stayingLocked(); err != nil {
		return err
	}
	if err := s.enlarge(size); err != nil || s.Unserved {
		return err
	}
	return d.inUse.Resize(s.LUN)
}

// End stops serving a disk, and closes it. Commands to it then end with LOGICAL UNIT NOT SUPPORTED;
// commands to other LUNs do not wait. Its data stays in its directory. The data of a disk that was
// served need not be durable.
//
// A command that hangs in the disk keeps it open. If ctx ends before the command does, the error
// says so, and the disk is closed when the command returns.
func (d *Disks) End(ctx context.Context, s *Disk) error {
	if err := d.table.begin(); err != nil {
		return err
	}
	released, err := d.leave(ctx, s)
	if err != nil {
		d.table.changes.Done()
		return err
	}
	unserved := released == nil
	if unserved {
		released = nobody
	}
	closed := make(chan error, 1)
	go func() {
		defer d.table.changes.Done()
		<-released
		var err error
		if unserved {
			err = s.flush()
		}
		closed <- errors.Join(err, d.Abandon(s))
	}()
	select {
	case err := <-closed:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%v is removed, and its disk is closed when the commands that hang in "+
			"it have returned: %w", s, ctx.Err())
	}
}

// leave takes a disk from its users for good. Nothing uses it when released is closed; nil: it was
// not in use. leave may be called again, while a command still hangs in the disk.
func (d *Disks) leave(ctx context.Context, s *Disk) (released <-chan struct{}, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	if !s.Serving() {
		s.leaving = true
		return s.released, nil
	}
	if err := d.refuseIfCloned(s); err != nil {
		return nil, err
	}
	if err := d.endSnapshots(ctx, s, true); err != nil {
		return nil, err
	}
	if released, err = d.inUse.Remove(s.LUN); err != nil {
		return nil, err
	}
	s.leaving, s.released = true, released
	s.set(false)
	d.announceRemoved(s)
	d.table.drop(s)
	return released, nil
}

// Withdraw stops serving a disk that no initiator uses, and its snapshots. If one does, it returns
// a *serving.InUseError. The disk stays open until End, and is not served again. If clones or
// others read its snapshots, it returns instance.ErrSnapshotInUse.
func (d *Disks) Withdraw(s *Disk) (err error) {
	if err := d.table.begin(); err != nil {
		return err
	}
	defer d.table.changes.Done()
	s.turn.Lock()
	defer s.turn.Unlock()
	if s.Serving() {
		if err := d.refuseIfCloned(s); err != nil {
			return err
		}
		// No snapshot has ended to be served if this is refused.
		for _, o := range append(d.snapshotsOf(s), s) {
			if err := d.inUse.CheckUnused(o.LUN); err != nil {
				return err
			}
		}
		if err := d.refuseIfViewed(s); err != nil {
			return err
		}
		if err := d.endSnapshots(context.Background(), s, false); err != nil {
			return err
		}
	}
	if err := d.refuseIfViewed(s); err != nil {
		return err
	}
	if s.Serving() {
		if s.released, err = d.withdrawLocked(s); err != nil {
			return err
		}
	}
	if s.released == nil {
		s.released = nobody
	}
	s.leaving = true
	return nil
}

// refuseIfViewed refuses a disk of which a snapshot is read that is no LUN.
func (d *Disks) refuseIfViewed(s *Disk) error {
	inst := s.Instance()
	if inst == nil {
		return nil
	}
	for _, name := range inst.Viewed() {
		if d.snapshotLUN(s, name) == nil {
			return fmt.Errorf("%v: %w %q: try again when it has been read", s,
				instance.ErrSnapshotInUse, name)
		}
	}
	return nil
}

// nobody is the channel of a disk that was released.
var nobody = func() <-chan struct{} {
	closed := make(chan struct{})
	close(closed)
	return closed
}()

// withdrawLocked stops serving a disk that no initiator uses, for now.
func (d *Disks) withdrawLocked(s *Disk) (released <-chan struct{}, err error) {
	if released, err = d.inUse.RemoveUnused(s.LUN); err != nil {
		return nil, err
	}
	s.set(false)
	d.announceRemoved(s)
	return released, nil
}

// announceRemoved logs that a LUN was removed.
func (d *Disks) announceRemoved(s *Disk) {
	d.handovers.Removed(s.LUN)
	d.opt.Log.Info("removed a LUN", zap.Uint16("lun", s.LUN), zap.String("image", s.Name))
}
