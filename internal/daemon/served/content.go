package served

import (
	"fmt"

	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/status"
)

// OpenContent opens a snapshot of a disk for the control socket. The disk is named by its name or
// its LUN.
func (d *Disks) OpenContent(name, snapshot string) (*control.Content, error) {
	s, err := d.named(name)
	if err != nil {
		return nil, err
	}
	inst := s.Instance()
	if inst == nil {
		return nil, fmt.Errorf("%v is not open", s)
	}
	opened, err := inst.OpenSnapshot(snapshot)
	if err != nil {
		return nil, err
	}
	return &control.Content{Disk: opened.Disk, Described: status.Content{
		Disk: s.Name, Identity: snapshotIdentity(inst, snapshot).Serial, Size: opened.Size(),
		Image: inst.Image(), Committed: inst.CommittedBefore(opened.Disk)}}, nil
}

// committed remembers the image that has the content of a snapshot.
func (s *Disk) committed(name, image string) error {
	inst := s.Instance()
	if inst == nil {
		return fmt.Errorf("%v is not open", s)
	}
	return inst.Committed(name, image)
}
