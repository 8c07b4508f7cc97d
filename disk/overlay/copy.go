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

// OpenWriter opens a fast way to write much to a file; done closes it. While busy reports true, the
// guest is active, and the writer should not slow it down.
type OpenWriter func(busy func() bool) (w *rawfile.Writer, done func())

// Progress gets reports of the copying. Any number of goroutines call it.
type Progress interface {
	// Wait says that the copying begins to wait for space, or goes on.
	Wait(scarce bool)
	// Missed says why the last pass over the image could not copy a part of it; nil: the pass has
	// copied everything.
	Missed(err error)
	// Fields returns fields for a log: the progress after that time.
	Fields(elapsed time.Duration) []zap.Field
}

// Follower gets what the copying reads from the image, so that it need not be read twice. Any
// number of goroutines call it.
type Follower interface {
	// UntilChunk returns how many bytes from off on to read at once; 0: it does not matter.
	UntilChunk(ctx context.Context, off int64) int64
	// Saw is called with content at off. It must not keep p.
	Saw(ctx context.Context, p []byte, off int64)
}

// NewSlots makes the slots that the copying of many disks shares on this machine.
func NewSlots() *slots.Slots {
	// Four more than there are processors: while some workers write or wait for storage, others
	// read ahead.
	n := max(1, min(runtime.GOMAXPROCS(0)+4, maxBuffers/hydrationChunk))
	return slots.New(n, slots.Options{Buffer: hydrationChunk})
}

// NewFarSlots makes the slots for the copying of disks whose images are far away. There are more,
// because a worker waits nearly all the time, and keeps its slot and its buffer meanwhile.
func NewFarSlots() *slots.Slots {
	opt := slots.Options{Buffer: hydrationChunk, Stall: 2 * farTimeout}
	return slots.New(maxBuffers/hydrationChunk, opt)
}

// Copy copies the blocks that the file lacks from the image while the guest works: first what the
// guest reads, then the rest in order. It returns nil when the file has every block, or ctx's error
// if ctx ends first. It tries again after errors of storage, waits while the image is out of reach,
// and returns disk.ErrFailed when the disk has failed. Only one Copy may run at a time.
func (o *Disk) Copy(ctx context.Context, opt CopyOptions) error {
	return newHydration(o, opt).run(ctx)
}
