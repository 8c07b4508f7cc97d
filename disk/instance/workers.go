package instance

import (
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/disk/overlay"
)

// Workers bound what goes on beside the guests of all disks that are opened with them: a daemon
// makes one for all of its disks. Any number of goroutines.
type Workers struct {
	copying *slots.Slots // of images into disks
	far     *slots.Slots // the same for images that are far away
	// of what identifies images; others, so that neither of the two waits for the other
	hashing *slots.Slots
}

// NewWorkers makes workers for a machine of as many processors as this one.
func NewWorkers() *Workers {
	return &Workers{
		copying: overlay.NewSlots(), far: overlay.NewFarSlots(),
		hashing: slots.New(2, slots.Options{}),
	}
}
