package instance

import (
	"kubevirt.io/disk/disk/internal/slots"
	"kubevirt.io/disk/disk/overlay"
)

// Workers limit the work beside the guests of all disks that share them. A daemon makes one for all
// of its disks. They are safe for concurrent use.
type Workers struct {
	copying *slots.Slots // copies images into disks
	far     *slots.Slots // copies images that are far away
	// hashes images; a separate limit, so that neither copying nor hashing waits for the other
	hashing *slots.Slots
}

// NewWorkers returns Workers for this machine's number of processors.
func NewWorkers() *Workers {
	return &Workers{
		copying: overlay.NewSlots(), far: overlay.NewFarSlots(),
		hashing: slots.New(2, slots.Options{}),
	}
}
