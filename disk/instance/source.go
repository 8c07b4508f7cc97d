package instance

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
)

// Source has the bytes of an image that is another disk, which does not change. Closing it closes
// that disk.
type Source struct {
	disk.Disk
	ID image.Identity // of the bytes
	// Instance is the disk with the bytes. If its image is wrong, so is a disk made of this Source.
	Instance *Instance
}

var _ image.Unsure = (*Source)(nil)

// Unverified is false, because Agree waits for all checks.
func (s *Source) Unverified() bool { return false }

// Agree waits until nothing of the other disk's image can turn out to be wrong.
func (s *Source) Agree(ctx context.Context) error { return s.Instance.Settled(ctx) }

// Verify does nothing after Agree.
func (s *Source) Verify(context.Context) error { return nil }

// Settled waits until the two descriptions of the disk's image were compared, and until the image
// was verified if it is served before that. The error is disk.ErrWrongContent if the image is
// wrong, ctx's, or says why this is unknown until the next start.
func (i *Instance) Settled(ctx context.Context) error {
	if i.copies == nil {
		return nil
	}
	select {
	case <-i.copies.settled:
	case <-ctx.Done():
		return ctx.Err()
	}
	if _, err := i.WriteAt(ctx, nil, 0); errors.Is(err, disk.ErrWrongContent) {
		return err
	}
	if err := i.copies.unproven; err != nil { // another call would not help
		return fmt.Errorf("its image could not be verified, and nothing may be made of it until a "+
			"restart has verified it: %v", err)
	}
	return nil
}

// Extent does not wait for far content.
func (s *Source) Extent(off, length int64) (disk.Extent, error) {
	if e, ok := s.Disk.(disk.Extenter); ok {
		ctx := context.Background()
		if disk.Far(s.Disk) {
			ctx = disk.AtHand
		}
		if run, err := e.Extent(ctx, off, length); !errors.Is(err, disk.ErrNotNow) {
			return run, err
		}
	}
	return disk.Extent{Length: length, Data: true}, nil
}

// farReads is how many reads of a disk are worth having under way if its image is far away.
const farReads = 8

// Parallel implements image.Source.
func (s *Source) Parallel() int {
	if disk.Far(s.Disk) {
		return farReads
	}
	return 1
}

func (s *Source) Identity() image.Identity { return s.ID }

// WillRead implements image.Source.
func (s *Source) WillRead(int64, int64) {}

// Check implements image.Source.
func (s *Source) Check() error { return nil }
