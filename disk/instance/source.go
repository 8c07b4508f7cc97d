package instance

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
)

// Source is a disk that nobody changes as the bytes of an image. Closing it closes the disk.
type Source struct {
	disk.Disk
	ID image.Identity // of the bytes
	// Instance is the disk that the bytes belong to. What is made of them is as right as its image.
	Instance *Instance
}

var _ image.Unsure = (*Source)(nil)

// Unverified is false, because Agree waits for what there is to find out.
func (s *Source) Unverified() bool { return false }

// Agree waits until nothing of the other disk's image can turn out to be wrong.
func (s *Source) Agree(ctx context.Context) error { return s.Instance.Settled(ctx) }

// Verify does nothing after Agree.
func (s *Source) Verify(context.Context) error { return nil }

// Settled waits until what describes the disk's image twice was compared, and until the image was
// verified if it was served before that. The error is disk.ErrWrongContent if the image is wrong,
// that of ctx, or says why this is not found out before the next start.
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
	if err := i.copies.unproven; err != nil { // to ask again would not help
		return fmt.Errorf("its image could not be verified, and nothing may be made of it until a "+
			"restart has verified it: %v", err)
	}
	return nil
}

// Extent asks only for what is at hand.
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
