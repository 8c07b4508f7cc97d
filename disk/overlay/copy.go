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
	// maxBuffers bounds the memory of the buffers of all that copy with the same slots. Bytes.
	maxBuffers = 16 << 20
	// logEvery is how often the log is told how far the disks that are being copied are, all
	// together.
	logEvery = 2 * time.Second
)

// CopyOptions say how the image of a disk is copied.
type CopyOptions struct {
	Slots    *slots.Slots // shared with other disks; see NewSlots and NewFarSlots
	Log      *zap.Logger  // nil: none
	Progress Progress     // nil: nobody is told
	Follower Follower     // nil: nobody wants to see what is read
	// Writer is a faster way to write to the disk's file. nil: there is none.
	Writer OpenWriter
}

// OpenWriter opens a way to write much to a file, which done closes. busy reports whether the guest
// does something, so that what would make it wait is left out.
type OpenWriter func(busy func() bool) (w *rawfile.Writer, done func())

// Progress is told how the copying goes on. Any number of goroutines.
type Progress interface {
	// Wait is called when the copying begins to wait for space, and when it goes on.
	Wait(scarce bool)
	// Fields says in a log how far it is after that time.
	Fields(elapsed time.Duration) []zap.Field
}

// Follower sees what the copying reads of the image, so that nobody need read it again. Any number
// of goroutines.
type Follower interface {
	// UntilChunk is how many bytes from off on are best read at once; 0: it does not matter.
	UntilChunk(ctx context.Context, off int64) int64
	// Saw is told what was read at off. It does not keep p.
	Saw(ctx context.Context, p []byte, off int64)
}

// NewSlots makes the slots that the copying of many disks shares, for a machine of as many
// processors as this one.
func NewSlots() *slots.Slots {
	// Four more than processors: workers that write, or wait for storage, keep no processor from
	// reading ahead.
	n := max(1, min(runtime.GOMAXPROCS(0)+4, maxBuffers/hydrationChunk))
	return slots.New(n, slots.Options{Buffer: hydrationChunk})
}

// NewFarSlots makes the slots that the copying of disks shares whose images are far away. Nearly
// all of that time is waiting, so that there are more of them, and one that waits keeps its slot
// and its buffer.
func NewFarSlots() *slots.Slots {
	opt := slots.Options{Buffer: hydrationChunk, Stall: 2 * farPatience}
	return slots.New(maxBuffers/hydrationChunk, opt)
}

// Copy copies what the file does not have yet from the image, beside the guest: first what the
// guest reads, then the rest in order. It returns nil when the file has every block, or ctx's error
// when that ends before. It goes on after errors of storage, which may be temporary, waits for an
// image that cannot be had now, and ends with disk.ErrFailed when the disk has failed. It is called
// once at a time.
func (o *Disk) Copy(ctx context.Context, opt CopyOptions) error {
	return newHydration(o, opt).run(ctx)
}
