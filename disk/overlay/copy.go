package overlay

import (
	"context"
	"runtime"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/disk/internal/slots"
)

const (
	// maxBuffers limits the memory for the buffers of all workers that share slots, in bytes.
	maxBuffers = 16 << 20
	// logEvery is how often the progress is logged, for all disks together.
	logEvery = 2 * time.Second
)

// CopyOptions say how to copy the image of a disk.
type CopyOptions struct {
	Slots    *slots.Slots // shared with other disks; see NewSlots and NewFarSlots
	Log      *zap.Logger  // nil: none
	Progress Progress     // nil: unused
	Follower Follower     // nil: unused
	// Writer opens a faster way to write to the disk's file. nil: there is none.
	Writer OpenWriter
}

// OpenWriter opens a fast way to write much to a file; done closes it. busy reports whether the
// guest is active, so that the writer does not slow it down.
type OpenWriter func(busy func() bool) (w *rawfile.Writer, done func())

// Progress follows the copying. It is safe for concurrent use.
type Progress interface {
	// Wait says that the copying begins to wait for space, or goes on.
	Wait(scarce bool)
	// Missed says why a part of the image could not be copied at the last try; nil: all could.
	Missed(err error)
	// Fields returns the progress after that time for a log.
	Fields(elapsed time.Duration) []zap.Field
}

// Follower sees what the copying reads from the image, so that nobody has to read it twice. It is
// safe for concurrent use.
type Follower interface {
	// UntilChunk returns how many bytes from off on to read at once; 0: it does not matter.
	UntilChunk(ctx context.Context, off int64) int64
	// Saw gets the content at off. It must not keep p.
	Saw(ctx context.Context, p []byte, off int64)
}

// NewSlots makes the slots that the copying of many disks shares on this machine.
func NewSlots() *slots.Slots {
	// Four more than processors: while some workers write or wait for storage, others can read
	// ahead.
	n := max(1, min(runtime.GOMAXPROCS(0)+4, maxBuffers/hydrationChunk))
	return slots.New(n, slots.Options{Buffer: hydrationChunk})
}

// NewFarSlots makes the slots for the copying of disks whose images are far away. There are more of
// them, because a worker waits nearly all the time and keeps its slot and its buffer meanwhile.
func NewFarSlots() *slots.Slots {
	opt := slots.Options{Buffer: hydrationChunk, Stall: 2 * farTimeout}
	return slots.New(maxBuffers/hydrationChunk, opt)
}

// Copy copies the blocks that the file lacks from the image, beside the guest: first what the guest
// reads, then the rest in order. It returns nil when the file has every block, or ctx's error if
// that ends first. It retries after errors of storage, which may be temporary, waits while the
// image is out of reach, and returns disk.ErrFailed when the disk has failed. Only one Copy may run
// at a time.
func (o *Disk) Copy(ctx context.Context, opt CopyOptions) error {
	return newHydration(o, opt).run(ctx)
}
