package daemon

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/target"
)

// Disk is one disk to serve.
type Disk struct {
	Name  string       // of its image, for people
	Image *image.Image // nil: the disk is complete, and is served without one
	// Dir is the directory of a persistent disk. "": the disk is ephemeral, in the directory of its
	// usage type, or in the work directory.
	Dir string
	// CopyAfter delays the copying of the image until it is closed. nil: no delay.
	CopyAfter <-chan struct{}
	// Empty makes a missing persistent disk from zeros, without an image.
	Empty bool
	DiskSettings

	container bool         // it is made from a container image
	volume    bool         // it is a volume's disk
	unserved  bool         // it gets no LUN
	after     func() error // called when the disk and its image are closed; nil: nothing
}

// openDisks finds the images to serve from the start, and makes a disk of each.
func (d *Daemon) openDisks(ctx context.Context) error {
	found, err := d.find(ctx)
	if err != nil {
		return err
	}
	d.initial, err = d.disks.add(found...)
	if err != nil {
		for _, disk := range found {
			closeImages(disk.Image)
		}
		return err
	}
	d.set(pages.StateOpening)
	if err := d.checkRoom(ctx); err != nil {
		return err
	}
	for _, s := range d.initial {
		if err := d.open(ctx, s); err != nil {
			return err
		}
	}
	for _, made := range d.homes {
		if err := made(); err != nil {
			return err
		}
	}
	if err := d.checkIdentities(d.initial); err != nil {
		return err
	}
	d.warnWithoutVolume()
	return nil
}

// open makes a disk from its image, or opens the disk of an earlier start.
func (d *Daemon) open(ctx context.Context, s *servedDisk) error {
	settings := d.disks.look(s).settings
	opt := instance.Options{
		Name:          s.name,
		Mode:          settings.CopyMode,
		WorkDir:       d.workDir(settings),
		PersistentDir: s.dir,
		OnImageChange: d.opt.OnImageChange,
		Leftovers:     d.leftovers(d.workDir(settings)),
		Owner:         d.opt.Owner,
		Size:          settings.Size,
		Empty:         s.empty,
		Identity:      settings.Identity,
		ReadOnly:      settings.ReadOnly && !s.volume, // even a read-only volume can grow
		Durable:       d.opt.EphemeralFlush,
		Log:           d.log.With(zap.Uint16("lun", s.lun)),
		Progress:      s.progress,
		Workers:       d.workers,
		CopyAfter:     s.copyAfter,
	}
	if !s.volume {
		opt.LUN = s.lun
	}
	if s.image != nil {
		opt.Reads = d.record.disk(s.image.Name(), s.image.Size())
	}
	configure, err := configures(s, &opt)
	if err != nil {
		return fmt.Errorf("%v: %w", s, err)
	}
	inst, err := instance.Open(ctx, s.image, opt)
	if errors.Is(err, disk.ErrNoSpace) {
		// The disk of an image that is gone may take the space. Usually such disks are removed
		// later, when all others are served.
		kept := d.sweep(ctx)
		inst, err = instance.Open(ctx, s.image, opt)
		err = d.explainKept(err, kept)
	}
	if err == nil {
		err = configure(inst)
	}
	if err != nil {
		err = d.explainSpace(err, settings.CopyMode)
		if errors.Is(err, disk.ErrNoSpace) && settings.UsageType != "" {
			err = fmt.Errorf("%w; that is the storage of its usage type %q", err,
				settings.UsageType)
		}
		return fmt.Errorf("%v: %w", s, err)
	}
	d.disks.opened(s, inst)
	return nil
}

// lun is an open disk as the target needs it.
func (d *Daemon) lun(s *servedDisk) target.LUN {
	now := d.disks.look(s)
	return target.LUN{
		Number:    s.lun,
		Name:      s.name,
		Disk:      now.instance.Disk,
		Identity:  now.instance.Identity,
		ReadOnly:  now.settings.ReadOnly || now.instance.ReadOnly,
		Removable: now.settings.Removable,
		Access:    now.settings.AccessMode,
		Volatile:  !now.instance.Persistent,
		Grown:     now.instance.Grown,
		Store:     now.instance.Store(),
	}
}

// flush makes a disk durable, if its mode promises that.
func (d *Daemon) flush(s *servedDisk) error {
	s.ending.Lock()
	defer s.ending.Unlock()
	inst := d.disks.look(s).instance
	if inst == nil {
		return nil
	}
	if err := inst.Flush(); err != nil {
		return fmt.Errorf("%v: acknowledged data may be lost: %w", s, err)
	}
	return nil
}

// close ends the work in the background, and closes a disk and its image.
func (d *Daemon) close(s *servedDisk) error {
	s.ending.Lock()
	defer s.ending.Unlock()
	after := s.after
	s.after = nil
	if after == nil {
		after = func() error { return nil }
	}
	inst := d.disks.take(s)
	if inst == nil {
		closeImages(s.image)
		return after()
	}
	if err := errors.Join(inst.Close(), after()); err != nil {
		return fmt.Errorf("%v: %w", s, err)
	}
	return nil
}

// measure tells the metrics which LUNs exist.
func (d *Daemon) measure() {
	d.measuring.Lock() // or an older list could replace a newer one
	defer d.measuring.Unlock()
	var all []metrics.Disk
	for _, s := range d.disks.served() {
		m := metrics.Disk{
			LUN: s.lun, Image: s.name, Size: d.disks.look(s).size,
			Failed: func() error { return d.disks.failure(s) },
			Space:  func() *disk.Usage { return d.disks.look(s).space.latest() },
		}
		if s.progress != nil {
			m.Progress = s.progress
		}
		all = append(all, m)
	}
	d.metrics.SetDisks(all)
}

// explainSpace says how the disk could take less space if a copy of its image does not fit.
func (d *Daemon) explainSpace(err error, mode instance.CopyMode) error {
	var space *image.SpaceError
	if mode != instance.CopyClone || !errors.As(err, &space) || space.Needed == 0 {
		return err
	}
	return fmt.Errorf("%w, or copy only what the guest writes, with %s", err,
		d.names.of(SettingCopyMode).with(string(instance.CopyOnWrite)))
}

// explainDescriptors says what to do if the disks need more open files than the process may have.
func (d *Daemon) explainDescriptors(err error) error {
	if !errors.Is(err, syscall.EMFILE) {
		return err
	}
	what := "the disks take"
	if disks := d.disks.all(); len(disks) > 0 {
		need := 0
		for _, s := range disks {
			need += d.openFiles(s)
		}
		what = fmt.Sprintf("%d disks take, up to %d, and one more for each backing file and each "+
			"session", len(disks), need)
	}
	return fmt.Errorf("the process may not open as many files as %s: raise the limit (ulimit -n, "+
		"or that of the container), or serve fewer images: %w", what, err)
}

// openFiles is the largest number of files that a disk keeps open: its lock and its own file. Until
// it is complete, also the image and the map; a disk that survives a crash of the machine has two
// maps.
func (d *Daemon) openFiles(s *servedDisk) int {
	switch {
	case s.progress == nil:
		return 2
	case s.dir != "" || d.opt.EphemeralFlush:
		return 5
	default:
		return 4
	}
}

// flushesAtOnce is how many disks are flushed at the same time. They wait for storage, which
// handles many at once.
const flushesAtOnce = 16

// flushDisks makes every disk durable. A disk that hangs is an error when ctx ends.
func (d *Daemon) flushDisks(ctx context.Context) error {
	return within(ctx, "flush", func() error {
		disks := d.disks.all()
		return forAll(len(disks), flushesAtOnce, func(i int) error { return d.flush(disks[i]) })
	})
}

// closeDisks closes all disks at once: each may wait a moment for its work in the background, and
// all share the time of a stop.
func (d *Daemon) closeDisks(ctx context.Context) error {
	return within(ctx, "close", func() error {
		d.disks.close()
		disks := d.disks.all()
		err := forAll(len(disks), len(disks), func(i int) error { return d.close(disks[i]) })
		return errors.Join(err, d.closeStreams())
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

// within runs f, and gives up waiting for it when ctx ends.
func within(ctx context.Context, what string, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s of the disks did not end in time: %w", what, ctx.Err())
	}
}
