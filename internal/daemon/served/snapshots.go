package served

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// ListSnapshots lists the snapshots of a disk, named by its name or its LUN, or of all disks for
// "".
func (d *Disks) ListSnapshots(name string) ([]status.Snapshot, error) {
	disks := d.table.all()
	if name != "" {
		s, err := d.findOpen(name)
		if err != nil {
			return nil, err
		}
		disks = []*Disk{s}
	}
	all := []status.Snapshot{}
	for _, s := range disks {
		inst := s.Instance()
		if inst == nil {
			continue
		}
		for _, one := range inst.Snapshots() {
			snapshot := status.Snapshot{Disk: s.Name, LUN: s.LUN, Name: one.Name,
				Created: one.Created, Size: one.Size, Used: one.Used}
			if lun := d.snapshotLUN(s, one.Name); lun != nil {
				snapshot.Served = lun.LUN
			}
			all = append(all, snapshot)
		}
	}
	return all, nil
}

// ChangeSnapshots carries out a request of the control socket. done is a sentence for a person.
func (d *Disks) ChangeSnapshots(ctx context.Context, req status.SnapshotRequest) (
	done string, err error) {
	disks := make([]*Disk, len(req.Disks))
	for i, name := range req.Disks {
		if disks[i], err = d.findOwn(name); err != nil {
			return "", err
		}
		if slices.Contains(disks[:i], disks[i]) {
			return "", fmt.Errorf("%v is named twice", disks[i])
		}
	}
	s := disks[0]
	what := fmt.Sprintf("the snapshot %q of %v", req.Name, s)
	switch req.Action {
	case status.SnapshotCreate:
		return fmt.Sprintf("took the snapshot %q of %v", req.Name, joined(disks)),
			d.TakeSnapshot(ctx, req.Name, disks...)
	case status.SnapshotDelete:
		return "deleted " + what, d.DeleteSnapshot(ctx, s, req.Name)
	case status.SnapshotRevert:
		return fmt.Sprintf("%v has the content of the snapshot %q again", s, req.Name),
			d.Revert(ctx, s, req.Name)
	case status.SnapshotServe:
		lun, err := d.serveSnapshot(ctx, s, req.Name)
		return fmt.Sprintf("LUN %d is %s, read-only, as %q", lun, what,
			snapshotName(s, req.Name)), err
	case status.SnapshotCommitted:
		return "noted the image of " + what, s.committed(req.Name, req.Identity, req.Image)
	case status.SnapshotUnserve:
		lun := d.snapshotLUN(s, req.Name)
		if lun == nil {
			return "", fmt.Errorf("%s is no LUN", what)
		}
		return what + " is no LUN any more", d.End(ctx, lun)
	}
	return "", fmt.Errorf("%q is not an action on a snapshot", req.Action)
}

func joined(disks []*Disk) string {
	all := make([]string, len(disks))
	for i, s := range disks {
		all[i] = s.String()
	}
	return strings.Join(all, " and ")
}

// findOpen finds an open disk by its name, or else by its LUN.
func (d *Disks) findOpen(name string) (*Disk, error) {
	var found []*Disk
	for _, s := range d.table.all() {
		if s.Name == name {
			found = append(found, s)
		}
	}
	if lun := serving.NumberIn(name); lun != 0 && len(found) == 0 {
		if s := d.table.find(lun); s != nil {
			found = append(found, s)
		}
	}
	switch {
	case len(found) > 1:
		return nil, fmt.Errorf("LUNs %d and %d both have the name %q: name the LUN instead",
			found[0].LUN, found[1].LUN, name)
	case len(found) == 0:
		var names []string
		for _, s := range d.table.all() {
			names = append(names, strconv.Quote(s.Name))
		}
		return nil, fmt.Errorf("there is no disk %q: use a LUN or one of %s", name,
			strings.Join(names, ", "))
	case found[0].Instance() == nil:
		return nil, fmt.Errorf("%v is not open", found[0])
	}
	return found[0], nil
}

// findOwn is findOpen for the snapshots of a disk. It refuses a disk whose content is not this
// daemon's, and a snapshot.
func (d *Disks) findOwn(name string) (*Disk, error) {
	s, err := d.findOpen(name)
	if err == nil && s.AlreadyOpen != nil {
		return nil, fmt.Errorf("%v is not kept here: take snapshots where the disk is", s)
	}
	return s, err
}

// TakeSnapshot takes a snapshot of disks, all at one point in time.
func (d *Disks) TakeSnapshot(ctx context.Context, name string, disks ...*Disk) error {
	if err := d.table.begin(); err != nil {
		return err
	}
	defer d.table.changes.Done()
	all := make([]*instance.Instance, len(disks))
	for i, s := range disks {
		if all[i] = s.Instance(); all[i] == nil {
			return fmt.Errorf("%v is not open", s)
		}
	}
	return instance.TakeSnapshot(ctx, name, all...)
}

// DeleteSnapshot deletes a snapshot. The space that only it needed is freed in the background.
func (d *Disks) DeleteSnapshot(ctx context.Context, s *Disk, name string) error {
	if err := d.table.begin(); err != nil {
		return err
	}
	defer d.table.changes.Done()
	inst := s.Instance()
	if inst == nil {
		return fmt.Errorf("%v is not open", s)
	}
	if lun := d.snapshotLUN(s, name); lun != nil {
		return fmt.Errorf("%w: it is LUN %d: end that first (snapshot unserve)",
			instance.ErrSnapshotInUse, lun.LUN)
	}
	for _, one := range inst.Snapshots() {
		if one.Name == name {
			if err := d.refuseIfNeeded(s, one); err != nil {
				return err
			}
		}
	}
	return inst.DeleteSnapshot(ctx, name)
}

// Revert gives a disk the content of a snapshot. It refuses with a *serving.InUseError while the
// disk is in use. The LUN is missing meanwhile.
func (d *Disks) Revert(ctx context.Context, s *Disk, name string) (err error) {
	if err := d.table.begin(); err != nil {
		return err
	}
	defer d.table.changes.Done()
	s.turn.Lock() // until it is served again, so that nobody acts on its absence
	defer s.turn.Unlock()
	inst, err := s.stayingLocked()
	if err != nil {
		return err
	}
	held, err := inst.OpenSnapshot(name) // so that it is not deleted
	if err != nil {
		return err
	}
	defer held.Close() // it only ends the use of the snapshot
	if s.Serving() {
		released, err := d.withdrawLocked(s)
		if errors.As(err, new(*serving.InUseError)) {
			err = fmt.Errorf("%w: stop its machine first", err)
		}
		if err != nil {
			return err
		}
		<-released // soon, because no client uses it
	}
	if !s.Unserved {
		defer func() { err = errors.Join(err, d.serveLocked(s, false)) }()
	}
	undo, _ := inst.Store().Load(disk.StoredAtomic) // a damaged one may be dropped
	// A client that is away now, and comes back, must not go on where it was.
	if err := serving.EndGeneration(inst.Store()); err != nil {
		return fmt.Errorf("%v: %w", s, err)
	}
	if err = inst.Revert(ctx, name); err != nil { // the content stays, with half a write
		err = errors.Join(err, inst.Store().Save(disk.StoredAtomic, undo))
	}
	return err
}

// snapshotName is the name under which a snapshot is served.
func snapshotName(s *Disk, name string) string { return s.Name + "@" + name }

// snapshotLUN is the disk of a served snapshot, or nil.
func (d *Disks) snapshotLUN(s *Disk, name string) *Disk {
	for _, o := range d.snapshotsOf(s) {
		if o.Name == snapshotName(s, name) {
			return o
		}
	}
	return nil
}

// snapshotsOf returns the snapshots of a disk that are LUNs.
func (d *Disks) snapshotsOf(s *Disk) []*Disk {
	return slices.DeleteFunc(d.table.served(), func(o *Disk) bool { return o.snapshotOf != s })
}

// serveSnapshot makes a snapshot a read-only LUN, until the daemon ends.
func (d *Disks) serveSnapshot(ctx context.Context, s *Disk, name string) (lun uint16, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	if lun := d.snapshotLUN(s, name); lun != nil {
		return lun.LUN, nil
	}
	inst, err := s.stayingLocked()
	if err != nil {
		return 0, err
	}
	opened, err := inst.OpenSnapshot(name)
	if err != nil {
		return 0, err
	}
	one := plan.Disk{Name: snapshotName(s, name), Source: s.source(),
		DiskSettings: options.DiskSettings{ReadOnly: true,
			CopyMode: instance.CopyNone, AccessMode: serving.AccessReadShared},
		AlreadyOpen: instance.WithoutFiles(opened.Disk, snapshotIdentity(inst, opened.Snapshot.ID),
			inst.BlockSize, true)}
	added, err := d.openFrom(ctx, one, origin{snapshotOf: s})
	if err != nil {
		return 0, err
	}
	if err := d.Serve(added, false); err != nil {
		return 0, errors.Join(err, d.Abandon(added))
	}
	return added.LUN, nil
}

// snapshotIdentity is the same each time that the snapshot with an ID is served.
func snapshotIdentity(inst *instance.Instance, id string) disk.Identity {
	sum := sha256.Sum256([]byte(inst.Identity.Serial + "@" + id))
	return disk.IdentityOf([18]byte(sum[:18]))
}

// endSnapshots stops serving the snapshots of a disk that is removed, which need its files. If one
// is in use, it returns a *serving.InUseError, unless force is set.
func (d *Disks) endSnapshots(ctx context.Context, s *Disk, force bool) error {
	for _, o := range d.snapshotsOf(s) {
		if !force {
			if err := d.Withdraw(o); err != nil {
				return err
			}
		}
		if err := d.End(ctx, o); err != nil {
			return err
		}
	}
	return nil
}
