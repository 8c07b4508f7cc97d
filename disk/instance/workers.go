package instance

import (
	"runtime"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/slots"
)

// Workers bound what goes on beside the guests of all disks that are opened with them: a daemon makes one for all of its
// disks. Any number of goroutines.
type Workers struct {
	copying *slots.Slots // of hydrations
	hashing *slots.Slots // of what identifies images; others, so that neither of the two waits for the other
}

// NewWorkers makes workers for a machine of as many processors as this one.
func NewWorkers() *Workers {
	// Four more than processors: workers that write, or wait for storage, keep no processor from reading ahead.
	copying := max(1, min(runtime.GOMAXPROCS(0)+4, image.MaxCopyBuffers/hydrationChunk))
	return &Workers{
		copying: slots.New(copying, slots.Options{Buffer: hydrationChunk}),
		hashing: slots.New(2, slots.Options{}),
	}
}
