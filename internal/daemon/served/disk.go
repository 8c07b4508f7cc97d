package served

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// Disk is a disk from when the daemon knows it until it is closed.
type Disk struct {
	plan.Disk                 // as it was opened; After is guarded by ending
	Progress  *image.Progress // nil: its mode copies nothing
	origin                    // set before the disk is in the table
	// storage is its place on this machine, for people. Set before it is opened.
	storage string

	mu  sync.Mutex
	now state // guarded by mu
	// reported is the last found state of the disk. Guarded by mu.
	reported reportedState

	// turn is held while the disk is reverted, or while it begins or ends to be served, so that
	// nobody acts on a state in between. Lock it before that of a snapshot of the disk.
	turn    sync.Mutex
	leaving bool // guarded by turn; it is not served any more, and will be closed
	// released is closed when nothing uses a leaving disk any more. Guarded by turn; nil: it was
	// not in use.
	released <-chan struct{}

	// ending is held while the disk is flushed or closed, so that no disk is closed during a flush.
	ending sync.Mutex
	closed bool // guarded by ending
}

// origin is the disk that another disk comes from.
type origin struct {
	snapshotOf *Disk // the disk whose snapshot this is; nil: it is none
	clonedFrom *Disk // the disk whose snapshot this one reads from; nil: none
}

// state is the part of a disk's state that can change.
type state struct {
	access   serving.AccessMode // in effect
	readOnly bool               // in effect
	size     int64              // bytes; 0: unknown yet
	instance *instance.Instance // nil: not opened yet, or closed
	space    *gauge[disk.Usage] // nil: the disk does not know
	contents *gauge[disk.Map]   // nil: the disk does not know
	serving  bool               // it is a LUN
	opening  time.Time          // when opening began; zero: it waits for its turn
}

func newDisk(p plan.Disk) *Disk {
	p.DiskSettings = p.DiskSettings.Resolved()
	s := &Disk{Disk: p, now: state{access: p.AccessMode, readOnly: p.ReadOnly}}
	if p.Image != nil {
		s.now.size = p.Image.Size()
	}
	if p.CopyMode != instance.CopyNone {
		s.Progress = new(image.Progress)
	}
	return s
}

// look returns the current state.
func (s *Disk) look() state {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// Instance is the open disk; nil: it is not open yet, or closed.
func (s *Disk) Instance() *instance.Instance { return s.look().instance }

// Serving reports whether the disk is a LUN.
func (s *Disk) Serving() bool { return s.look().serving }

// IsSnapshot reports whether the disk is a snapshot, which is served for as long as the daemon
// runs.
func (s *Disk) IsSnapshot() bool { return s.snapshotOf != nil }

// set records whether the disk is a LUN.
func (s *Disk) set(serving bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.serving = serving
}

// opened records the instance.
func (s *Disk) opened(inst *instance.Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.instance, s.now.size, s.now.space = inst, inst.Size(), newSpaceGauge(inst.Disk)
	s.now.contents = newMapGauge(inst.Disk)
}

// take removes and returns the instance, for the caller to close, or returns nil.
func (s *Disk) take() *instance.Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	inst := s.now.instance
	s.now.instance, s.now.space, s.now.contents = nil, nil, nil
	return inst
}

// enlarge enlarges an open disk, if it is smaller.
func (s *Disk) enlarge(size int64) error {
	if s.look().size >= size {
		return nil
	}
	inst := s.Instance()
	if inst == nil {
		return fmt.Errorf("%v is not open", s)
	}
	if err := inst.Grow(size); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.size = size
	return nil
}

// Failure says why the disk has failed for good, or returns nil.
func (s *Disk) Failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failureLocked()
}

// failureLocked tests the disk with an empty write, which changes nothing and waits for nothing.
// After a failed flush, every write returns ErrFailed. After the image has turned out to be wrong,
// every write returns ErrWrongContent, even on a read-only disk.
func (s *Disk) failureLocked() error {
	if s.now.instance == nil {
		return nil
	}
	_, err := s.now.instance.WriteAt(context.Background(), nil, 0)
	if errors.Is(err, disk.ErrFailed) || errors.Is(err, disk.ErrWrongContent) {
		return err
	}
	return nil
}

// stayingLocked returns the open disk, unless it is about to be closed.
func (s *Disk) stayingLocked() (*instance.Instance, error) {
	inst := s.Instance()
	if inst == nil || s.leaving {
		return nil, fmt.Errorf("%v is not open", s)
	}
	return inst, nil
}

// flush makes the disk durable, if its mode promises that.
func (s *Disk) flush() error {
	s.ending.Lock()
	defer s.ending.Unlock()
	inst := s.Instance()
	if inst == nil {
		return nil
	}
	if err := inst.Flush(); err != nil {
		return fmt.Errorf("%v: acknowledged data may be lost: %w", s, err)
	}
	return nil
}

// close ends the background work, and closes the disk and its image. Later calls do nothing.
func (s *Disk) close() error {
	s.ending.Lock()
	defer s.ending.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.Progress != nil {
		s.Progress.GiveUp()
	}
	after := s.After
	s.After = nil
	if after == nil {
		after = func() error { return nil }
	}
	inst := s.take()
	if inst == nil {
		plan.CloseImages([]plan.Disk{s.Disk})
		return after()
	}
	if err := errors.Join(inst.Close(), after()); err != nil {
		return fmt.Errorf("%v: %w", s, err)
	}
	return nil
}

// options is an open disk in the form that serving needs.
func (s *Disk) options() serving.Options {
	now := s.look()
	opt := serving.Options{
		Number:    s.LUN,
		Name:      s.Name,
		Disk:      now.instance.Disk,
		Identity:  now.instance.Identity,
		BlockSize: now.instance.BlockSize,
		ReadOnly:  now.readOnly || now.instance.ReadOnly,
		Access:    now.access,
		Volatile:  !now.instance.Persistent,
		Grown:     now.instance.Grown,
		Source:    s.source(),
		Storage:   s.storage,
	}
	if s.AlreadyOpen == nil { // otherwise its server keeps its data
		opt.Store = now.instance.Store()
	}
	return opt
}

// status returns the disk's part of /status, without its space and users.
func (s *Disk) status() status.LUN {
	s.mu.Lock()
	defer s.mu.Unlock()
	lun := status.LUN{
		LUN:        s.LUN,
		Image:      s.Name,
		Format:     string(image.FormatRaw),
		SizeBytes:  s.now.size,
		CopyMode:   string(s.CopyMode),
		AccessMode: string(s.now.access),
		ReadOnly:   s.now.readOnly,
		UsageType:  s.UsageType,
		SignedBy:   s.SignedBy,
	}
	if s.Digests != nil {
		lun.Digest, lun.PlatformDigest = s.Digests()
	}
	if s.Image != nil {
		lun.Format = string(s.Image.Format())
	}
	if s.now.instance != nil {
		lun.ReadOnly = s.now.readOnly || s.now.instance.ReadOnly
		lun.Serial = s.now.instance.Identity.Serial
		lun.BlockSize = s.now.instance.BlockSize
		lun.Persistent = s.now.instance.Persistent
		lun.NAA = hex.EncodeToString(s.now.instance.Identity.NAA[:])
	}
	if s.Volume {
		lun.Volume = s.Name
	}
	if s.Progress != nil {
		copied, data := s.Progress.Data()
		lun.Copy = &status.Copy{
			CopiedBytes: copied, DataBytes: data, TotalBytes: s.Progress.Total(),
			Complete: s.Progress.Finished(), WaitsForSpace: s.Progress.Waiting(),
		}
	}
	if err := s.failureLocked(); err != nil {
		lun.Failure = err.Error()
	}
	return lun
}
