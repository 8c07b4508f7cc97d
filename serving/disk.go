package serving

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
)

// MaxNumber is the highest number of a disk: the flat space addressing method has 14 bits for a LUN
// (SAM-5 4.7.7.3).
const MaxNumber = 0x3fff

// NumberIn parses the name of an export, or an argument of a command, as the number of a disk. It
// returns 0 if the name is not a number.
func NumberIn(name string) uint16 {
	n, err := strconv.ParseUint(name, 10, 16)
	if err != nil || n > MaxNumber || strconv.FormatUint(n, 10) != name {
		return 0
	}
	return uint16(n)
}

// Options say what a disk is and how it is served.
type Options struct {
	Number uint16 // unique; at most MaxNumber
	Name   string // the image's name
	// closed by the caller after Released; serving does not close it
	Disk     disk.Disk
	Identity disk.Identity // unique for each disk
	// BlockSize is the length of a logical block in bytes, 512 or 4096; 0: 512. With another length
	// a guest does not find the partitions that it has made.
	BlockSize int
	ReadOnly  bool       // write-protected for good: the disk may be open for reading only
	Access    AccessMode // "" is write-exclusive
	Store     Store      // nil: nothing is kept

	// For messages about requests that wait.

	Source  Source // of far content
	Storage string // where the disk lies on this machine, such as "the directory /data"

	// For front ends that ask for it.

	// a loss of power destroys the disk, so nothing is promised through one
	Volatile bool
	// larger than when peers last saw the disk, so front ends tell them
	Grown bool
}

// Disk is a disk in use. Any number of goroutines may use it.
type Disk struct {
	Options // never changes

	// Optional interfaces of the disk; nil: the disk does not have it.

	Discards disk.Discarder
	Zeroes   disk.Zeroer
	Extents  disk.Extenter
	Layers   disk.Layered
	History  disk.Historian
	Estimate disk.Estimator
	// Remote is the disk if another server has it.
	Remote disk.Remote
	far    bool // see disk.Far

	// Boot is drawn for each use of the disk: see Generation.
	Boot       string
	generating sync.Mutex // locked while the store is read or written
	generation string     // guarded by generating; "": not known yet

	// Ranges orders accesses to the disk that must not overtake each other, in bytes. A request can
	// be aborted while its disk call still runs. Every write holds its range until its disk calls
	// have ended, so its data never comes after a newer write's. A request that reads and changes
	// the disk in one step holds its range exclusively: reads wait, too. The owner of a hold is the
	// peer's name.
	Ranges rangelock.Table

	protected atomic.Bool // written under Disks.mu
	exclusive atomic.Bool // written under handing and Disks.mu
	owner     atomic.Pointer[Peer]

	size     atomic.Int64 // written under resizing
	resizing sync.Mutex

	handing sync.Mutex // held while it changes who may use the disk; may wait for the store
	// kept is the owner that is stored; written under handing
	kept atomic.Pointer[Peer]
	// unkept is the owner that could not be stored, or nil; written under handing
	unkept atomic.Pointer[unkept]
	// handover says who is admitted in addition to the owner, and who is fenced. Never nil; written
	// under handing and Disks.mu.
	handover atomic.Pointer[handoverState]

	troubles
	waits waits
	uses
	ctx    context.Context // ends when the disk is removed
	cancel context.CancelFunc

	stall stall

	fronts []Front // set before the disk is in use

	clients map[*Client]struct{} // guarded by Disks.mu; clients that have accessed the disk
	// guarded by Disks.mu; for each name of a crowd, the process that uses the disk or did last
	processes map[string]int32
	sameNames map[string]struct{} // guarded by Disks.mu; names that FirstUse has warned about
}

// newDisk checks the options and asks the disk once for its optional interfaces.
func newDisk(opt Options) (*Disk, error) {
	access, err := ParseAccessMode(string(opt.Access))
	switch {
	case err != nil:
		return nil, err
	case opt.Number > MaxNumber:
		return nil, fmt.Errorf("a number is at most %d", MaxNumber)
	case opt.Disk == nil:
		return nil, errors.New("has no disk")
	case opt.BlockSize != 0 && opt.BlockSize != disk.SectorSize && opt.BlockSize != disk.LongBlock:
		return nil, fmt.Errorf("a logical block has %d or %d bytes, not %d", disk.SectorSize,
			disk.LongBlock, opt.BlockSize)
	}
	opt.BlockSize = max(opt.BlockSize, disk.SectorSize)
	if size := opt.Disk.Size(); size <= 0 || size%int64(opt.BlockSize) != 0 {
		return nil, fmt.Errorf("disk size %d is not a positive multiple of %d", size, opt.BlockSize)
	}
	opt.Access = access
	opt.ReadOnly = opt.ReadOnly || access == AccessReadShared
	d := &Disk{Options: opt, far: disk.Far(opt.Disk), Boot: rand.Text()}
	d.Discards, _ = opt.Disk.(disk.Discarder)
	d.Zeroes, _ = opt.Disk.(disk.Zeroer)
	d.Extents, _ = opt.Disk.(disk.Extenter)
	d.Layers, _ = opt.Disk.(disk.Layered)
	d.History, _ = opt.Disk.(disk.Historian)
	d.Estimate, _ = opt.Disk.(disk.Estimator)
	d.Remote, _ = opt.Disk.(disk.Remote)
	d.protected.Store(opt.ReadOnly)
	d.exclusive.Store(access == AccessWriteExclusive)
	d.size.Store(opt.Disk.Size())
	d.idle = make(chan struct{})
	d.ctx, d.cancel = context.WithCancel(context.Background())
	if err := d.restoreHandover(); err != nil {
		return nil, err
	}
	return d, nil
}

// Size is the size in bytes that peers may know. It grows only by Disks.Resize.
func (d *Disk) Size() int64 { return d.size.Load() }

// Protected reports whether the disk is write-protected, here or at its server.
func (d *Disk) Protected() bool {
	return d.protected.Load() || d.Remote != nil && d.Remote.ReadOnly()
}

// Exclusive reports whether the disk is for one peer at a time.
func (d *Disk) Exclusive() bool { return d.exclusive.Load() }

// removedUse is added to the use count of a removed disk, which makes the count negative.
const removedUse = math.MinInt64

// uses counts users of a disk and its store, which are released when there are none.
type uses struct {
	n    atomic.Int64  // negative once the disk is removed
	idle chan struct{} // closed when the disk is removed and nothing uses it
	once sync.Once
}

// Begin counts a use of the disk and its store, until End. It returns false if the disk is removed.
func (s *uses) Begin() bool {
	if s.n.Add(1) > 0 {
		return true
	}
	s.End()
	return false
}

// End ends a use.
func (s *uses) End() {
	if s.n.Add(-1) == removedUse {
		s.once.Do(func() { close(s.idle) })
	}
}

// remove makes Begin return false from now on.
func (s *uses) remove() {
	if s.n.Add(removedUse) == removedUse {
		s.once.Do(func() { close(s.idle) })
	}
}

// Removed reports whether the disk was removed.
func (s *uses) Removed() bool { return s.n.Load() < 0 }

// Released is closed when the disk was removed and nothing uses it or its store any more.
func (s *uses) Released() <-chan struct{} { return s.idle }

// lastLook is the longest time between two looks of UntilReleased.
const lastLook = time.Second

// UntilReleased calls look at once, and then again and again, until the disk is released or ctx
// ends. A front end calls it for a removed disk. look answers the requests that hang in the disk,
// in place of their goroutines.
func (s *uses) UntilReleased(ctx context.Context, look func()) {
	for wait := stallTick; ; wait = min(2*wait, lastLook) {
		look()
		select {
		case <-s.idle:
			return
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
