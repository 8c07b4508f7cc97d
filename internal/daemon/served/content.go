package served

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/status"
)

// settleTime is how long a request for content waits until the image is verified. Then the client
// must ask again.
const settleTime = 5 * time.Second

// OpenContent opens a snapshot of a disk for the control socket. The disk is named by its name or
// its LUN.
func (d *Disks) OpenContent(name, snapshot string) (*control.Content, error) {
	s, err := d.findOwn(name)
	if err != nil {
		return nil, err
	}
	inst := s.Instance()
	if inst == nil {
		return nil, fmt.Errorf("%v is not open", s)
	}
	// If this image turned out to be wrong later, an image made from it would remain.
	ctx, stop := context.WithTimeout(context.Background(), settleTime)
	defer stop()
	if err := inst.Settled(ctx); errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("%v: its image is still being verified: try again when that is "+
			"over (%w)", s, disk.ErrNotNow)
	} else if err != nil {
		return nil, fmt.Errorf("%v: %w", s, err)
	}
	opened, err := inst.OpenSnapshot(snapshot)
	if err != nil {
		return nil, err
	}
	return &control.Content{Disk: opened.Disk, Described: status.Content{Disk: s.Name,
		Identity: snapshotIdentity(inst, opened.Snapshot.ID).Serial, Size: opened.Size(),
		Image: inst.Image(), Reference: s.From,
		Committed: inst.CommittedBefore(opened.Disk)}}, nil
}

// committed remembers the image that has the content of a snapshot. identity identifies the
// snapshot: another may have its name since it was read.
func (s *Disk) committed(name, identity, image string) error {
	inst := s.Instance()
	if inst == nil {
		return fmt.Errorf("%v is not open", s)
	}
	for _, one := range inst.Snapshots() {
		if snapshotIdentity(inst, one.ID).Serial == identity {
			return inst.Committed(one.ID, image)
		}
	}
	return fmt.Errorf("%v: the snapshot %q that was read is not there any more", s, name)
}
