package served

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/adapt"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/serving"
)

// Disks are the disks of one daemon.
type Disks struct {
	opt      *options.Options
	inUse    *serving.Disks
	workers  *instance.Workers
	record   *recorder            // nil: nothing is recorded
	storages []*gauge[disk.Usage] // of the usage types, in the order of their names
	table    table
	plan     *plan.Plan // set by Start
	initial  []*Disk    // the disks of the plan; set by Start
	// handovers is notified when LUNs are added and removed; set by ServeAll.
	handovers *control.Server

	// volumesID identifies the directory of the volumes that are served; "": none are. Set before
	// the first disk.
	volumesID string

	// Stopping ends when no disk may be added any more, and disks that are being opened give up.
	Stopping context.Context
	stop     context.CancelFunc

	// OpenInstance is instance.Open, except in tests.
	OpenInstance func(context.Context, *image.Image, instance.Options) (*instance.Instance, error)
}

// New returns an empty set of disks, which will be served from inUse.
func New(opt *options.Options, inUse *serving.Disks) (d *Disks, err error) {
	d = &Disks{opt: opt, inUse: inUse, workers: instance.NewWorkers(), OpenInstance: instance.Open}
	d.Stopping, d.stop = context.WithCancel(context.Background())
	for _, name := range opt.UsageTypes.Names() {
		d.storages = append(d.storages, &gauge[disk.Usage]{question: func() (disk.Usage, error) {
			free, err := osfile.AvailableSpace(opt.UsageTypes[name])
			return disk.Usage{Available: free}, err
		}})
	}
	d.record, err = newRecorder(opt.RecordBoot, opt.Setting(&opt.RecordBoot), opt.Log)
	return d, err
}

// Start opens the disks of a plan, and owns their images from now on. After an error, Close closes
// the open ones.
func (d *Disks) Start(ctx context.Context, p *plan.Plan) (err error) {
	d.plan = p
	d.table.keep(p.Kept())
	if d.initial, err = d.table.add(p.Disks...); err != nil {
		plan.CloseImages(p.Disks)
		return err
	}
	if err := p.CheckRoom(ctx); err != nil {
		return err
	}
	for _, s := range d.initial {
		if err := d.open(ctx, s); err != nil {
			return err
		}
	}
	if err := p.Made(); err != nil {
		return err
	}
	return d.checkIdentities(d.initial)
}

// ServeAll makes the started disks LUNs. From now on, handovers is notified of each change.
func (d *Disks) ServeAll(handovers *control.Server) error {
	d.handovers = handovers
	for _, s := range d.initial {
		if err := d.expose(s); err != nil {
			return err
		}
	}
	go d.watch()
	return nil
}

// open makes a disk from its image, or opens the disk of an earlier start.
func (d *Disks) open(ctx context.Context, s *Disk) error {
	if s.AlreadyOpen != nil {
		s.opened(s.AlreadyOpen)
		return nil
	}
	workDir := d.opt.WorkDirOf(s.DiskSettings)
	s.beginOpening(workDir)
	opt := instance.Options{
		Name:          s.Name,
		Mode:          s.CopyMode,
		WorkDir:       workDir,
		PersistentDir: s.Dir,
		OnImageChange: d.opt.OnImageChange,
		Leftovers:     d.opt.LeftoversIn(workDir),
		Owner:         d.opt.Owner,
		Size:          s.Size,
		BlockSize:     s.BlockSize,

		BlockSizeKnown: s.BlockSizeKnown,
		Empty:          s.Empty,
		Identity:       s.Identity,
		ReadOnly:       s.ReadOnly && !s.Volume, // even a read-only volume can grow
		Durable:        d.opt.EphemeralFlush,
		Log:            d.opt.Log.With(zap.Uint16("lun", s.LUN)),
		Progress:       s.Progress,
		Workers:        d.workers,
		CopyAfter:      s.CopyAfter,
	}
	if !s.Volume {
		opt.LUN = s.LUN
	}
	var config []byte
	var configured atomic.Bool
	if s.Image != nil {
		opt.Reads = d.record.disk(s.Image.Name(), s.Image.Size())
	}
	if s.Config != nil {
		var err error
		if config, err = s.Config(); err != nil { // the image of a complete disk is closed soon
			return fmt.Errorf("%v: %w", s, err)
		}
	}
	if reads := opt.Reads; reads != nil && config != nil {
		opt.Reads = func(off, length int64) {
			if configured.Load() { // earlier reads are not the guest's
				reads(off, length)
			}
		}
	}
	var inst *instance.Instance
	err := d.plan.MakeRoom(ctx, s.CopyMode, func() (err error) {
		inst, err = d.OpenInstance(ctx, s.Image, opt)
		return err
	})
	if err == nil && config != nil {
		if err = adapt.Configure(inst.Disk, config); err != nil {
			err = errors.Join(err, inst.Close())
		}
		configured.Store(true)
	}
	if err != nil {
		if errors.Is(err, disk.ErrNoSpace) && s.UsageType != "" {
			err = fmt.Errorf("%w; that is the storage of its usage type %q", err, s.UsageType)
		}
		return fmt.Errorf("%v: %w", s, err)
	}
	s.opened(inst)
	return nil
}

// checkIdentities compares open disks, because a disk keeps its former identity.
func (d *Disks) checkIdentities(disks []*Disk) error {
	var all []plan.Disk
	for _, s := range disks {
		if inst := s.Instance(); inst != nil {
			one := plan.Disk{Name: s.Name, DiskSettings: s.DiskSettings}
			one.Identity = inst.Identity
			all = append(all, one)
		}
	}
	return plan.CheckIdentities(d.opt, all)
}

// Stop lets no disk be added any more. Disks that are being opened give up.
func (d *Disks) Stop() { d.stop() }

// flushesAtOnce is how many disks are flushed at the same time. They wait for storage, which
// handles many at once.
const flushesAtOnce = 16

// Flush makes every disk durable, and then saves the first reads of guests. A disk that hangs is an
// error when ctx ends.
func (d *Disks) Flush(ctx context.Context) error {
	return Within(ctx, "flush", func() error {
		disks := d.table.all()
		err := forAll(len(disks), flushesAtOnce, func(i int) error { return disks[i].flush() })
		d.record.save()
		return err
	})
}

// Close closes all disks at once: each may wait a moment for its background work, and all share the
// time of a stop. Only clones are closed before the disks that they read from. Close calls last
// afterwards.
func (d *Disks) Close(ctx context.Context, last func() error) error {
	return Within(ctx, "close", func() error {
		d.table.close()
		var err error
		for _, disks := range d.byDepth() {
			err = errors.Join(err,
				forAll(len(disks), len(disks), func(i int) error { return disks[i].close() }))
		}
		return errors.Join(err, last())
	})
}

// forAll calls f for 0 to n-1, some at once, and returns the errors in their order.
func forAll(n, atOnce int, f func(i int) error) error {
	all := make([]error, n)
	var group errgroup.Group
	group.SetLimit(max(atOnce, 1))
	for i := range n {
		group.Go(func() error {
			all[i] = f(i)
			return nil
		})
	}
	_ = group.Wait()
	return errors.Join(all...)
}

// Within runs f, and gives up waiting for it when ctx ends.
func Within(ctx context.Context, what string, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s of the disks did not end in time: %w", what, ctx.Err())
	}
}

// ExplainDescriptors says what to do if the disks need more open files than the process may have.
func (d *Disks) ExplainDescriptors(err error) error {
	if !errors.Is(err, syscall.EMFILE) {
		return err
	}
	return fmt.Errorf("the process may not open as many files as the disks take: raise the limit "+
		"(ulimit -n, or that of the container), or serve fewer images: %w", err)
}
