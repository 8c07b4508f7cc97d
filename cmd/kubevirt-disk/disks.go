package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/pages"
)

// servedDisk is an image on its way to be a LUN.
type servedDisk struct {
	diskSettings
	name     string
	format   image.Format
	capacity int64              // bytes
	image    *image.Image       // nil: a persistent disk that is served without one
	progress *image.Progress    // nil: nothing is copied in this mode
	instance *instance.Instance // guarded by state.mu while pages are served; nil: not made yet, or closed
	space    *spaceGauge        // guarded by state.mu; nil: not made yet, closed, or it cannot tell
}

// openDisks validates every image before it makes the first disk, so that a bad one is known at once.
func (d *daemon) openDisks(ctx context.Context) error {
	disks, err := d.findDisks()
	d.state.setDisks(disks)
	if err != nil {
		return err
	}
	dirs := make([]string, len(disks)) // of persistent disks
	if d.cfg.persistentDir != "" {
		if dirs, err = instance.PersistentDirs(d.cfg.persistentDir, names(disks)); err != nil {
			return explainVolume(err, d.cfg.persistentDir)
		}
	}
	d.state.set(pages.StateOpening)
	workers := instance.NewWorkers()
	swept := false
	for i, s := range disks {
		opt := instance.Options{
			Mode:          s.copyMode,
			WorkDir:       d.cfg.workDir,
			PersistentDir: dirs[i],
			OnImageChange: d.cfg.onImageChange,
			Owner:         d.cfg.owner(),
			Size:          s.size,
			Identity:      s.identity,
			ReadOnly:      s.readOnly,
			Durable:       d.cfg.ephemeralFlush,
			Log:           d.log.With(zap.Uint16("lun", s.lun)),
			Progress:      s.progress,
			Workers:       workers,
		}
		inst, err := instance.Open(ctx, s.image, opt)
		if errors.Is(err, disk.ErrNoSpace) && !swept {
			// What takes the space may be the disk of an image that is gone, which is otherwise removed once all are served.
			swept = true
			d.sweep(ctx)
			inst, err = instance.Open(ctx, s.image, opt)
		}
		if err != nil {
			return fmt.Errorf("LUN %d (%q): %w", s.lun, s.name, explainSpace(err, s.copyMode))
		}
		d.state.opened(s, inst)
	}
	if err := checkIdentities(disks, func(s *servedDisk) disk.Identity { return s.instance.Identity }); err != nil {
		return err
	}
	d.warnWithoutVolume()
	d.metrics.SetDisks(d.measured(disks))
	return nil
}

// explainSpace says how a disk takes less space, where a copy of its image does not fit.
func explainSpace(err error, mode instance.CopyMode) error {
	var space *image.SpaceError
	if mode != instance.CopyClone || !errors.As(err, &space) || space.Needed == 0 {
		return err
	}
	return fmt.Errorf("%w, or copy only what the guest writes, with --%s=%s (%s)", err, keyCopyMode, instance.CopyOnWrite,
		strings.Join(selectSettings([]string{keyCopyMode})[0].env, ", "))
}

// explainDescriptors says what to do where the process may not open as many files as the disks take.
func (d *daemon) explainDescriptors(err error) error {
	if !errors.Is(err, syscall.EMFILE) {
		return err
	}
	what := "the disks take"
	if disks := d.state.servedDisks(); len(disks) > 0 {
		need := 0
		for _, s := range disks {
			need += d.openFiles(s)
		}
		what = fmt.Sprintf("%d disks take, up to %d, and one more for each backing file and each session", len(disks), need)
	}
	return fmt.Errorf("the process may not open as many files as %s: raise the limit (ulimit -n, or that of the container), or serve fewer images: %w", what, err)
}

// openFiles is how many files a disk keeps open at most: its lock and its own file, and until it is complete also the image and the map, of
// which a disk that survives a crash of the machine has two.
func (d *daemon) openFiles(s *servedDisk) int {
	switch {
	case s.copyMode == instance.CopyNone:
		return 2
	case d.cfg.persistentDir != "" || d.cfg.ephemeralFlush:
		return 5
	default:
		return 4
	}
}

// checkIdentities refuses disks that initiators could not tell apart: a multipath driver would take them for two paths to one disk, and write
// the data of each to both. A disk keeps what it was given before, so that not only what is set now can be the same.
// What is not set is not compared.
func checkIdentities(disks []*servedDisk, of func(s *servedDisk) disk.Identity) error {
	serials, naas := map[string]*servedDisk{}, map[[8]byte]*servedDisk{}
	var all []error
	same := func(other, s *servedDisk, what, value, key string) {
		all = append(all, fmt.Errorf("LUN %d (%q) and LUN %d (%q) have the same %s, %s, and would be taken for one disk: give one of them another %q under %q in the configuration file",
			other.lun, other.name, s.lun, s.name, what, value, key, keyDisks))
	}
	for _, s := range disks {
		id := of(s)
		if other := serials[id.Serial]; other != nil && id.Serial != "" {
			same(other, s, "serial number", id.Serial, keySerial)
		}
		if other := naas[id.NAA]; other != nil && id.NAA != [8]byte{} {
			same(other, s, "NAA identifier", hex.EncodeToString(id.NAA[:]), keyNAA)
		}
		serials[id.Serial], naas[id.NAA] = s, s
	}
	return errors.Join(all...)
}

// findDisks finds the images and how each is to be served. What it returns with an error is to be closed as well.
func (d *daemon) findDisks() ([]*servedDisk, error) {
	if err := d.cfg.checkDirectories(); err != nil {
		return nil, err
	}
	var wrong problems.List
	formats := d.cfg.formats(&wrong)
	if err := wrong.Err(); err != nil { // which the images would be refused for, in other words
		return nil, err
	}
	images, err := d.cfg.openImages(image.Options{Formats: formats})
	var disks []*servedDisk
	switch {
	case err == nil:
		for _, img := range images {
			info := img.Info()
			disks = append(disks, &servedDisk{
				name: img.Name(), format: info.Format, capacity: img.Size(), image: img,
			})
			d.logAssumed(info)
		}
	case len(d.cfg.images) == 0 && d.cfg.persistentDir != "" && isNoImage(err) && instance.HasPersistent(d.cfg.persistentDir):
		d.log.Info("there is no image: the disk of the volume is served without one", zap.String("directory", d.cfg.persistentDir))
		disks = append(disks, &servedDisk{name: instance.PersistentName, format: image.FormatRaw})
	case len(d.cfg.images) > 0:
		return nil, err
	default:
		return nil, explainScan(err, d.cfg.diskDir)
	}
	settings, err := d.cfg.settle(disks)
	if err != nil {
		return disks, err
	}
	for i, s := range disks {
		s.diskSettings = settings[i]
		if s.copyMode != instance.CopyNone {
			s.progress = new(image.Progress)
		}
	}
	return disks, nil
}

// settle is how each of the disks is to be served, or why it cannot be.
func (c *config) settle(disks []*servedDisk) ([]diskSettings, error) {
	var wrong problems.List
	var backing []string
	for _, s := range disks {
		if s.image == nil {
			continue
		}
		for _, b := range s.image.Info().BackingChain {
			backing = append(backing, b.Name)
		}
	}
	settings := c.settingsFor(names(disks), &wrong, backing...)
	wanted := make([]*servedDisk, len(settings))
	for i, s := range settings {
		wanted[i] = &servedDisk{diskSettings: s, name: disks[i].name}
		if disks[i].image == nil {
			if s.setFormat == image.FormatQcow2 {
				wrong.Add(fmt.Sprintf("%q of %q", keyDisks, disks[i].name),
					"key %q: the disk of a volume is always raw", keyFormat)
			}
			continue
		}
		if err := s.copyMode.Check(disks[i].image); err != nil {
			wrong.Add(s.copyModeSource, "%v", err)
		}
	}
	// Before the disks are made, as they would keep what they were given when the file is put right.
	identity := func(s *servedDisk) disk.Identity { return s.identity }
	if err := checkIdentities(wanted, identity); err != nil {
		wrong.AddError(err)
	}
	return settings, wrong.Err()
}

// logAssumed tells of an image that looks like something else than what it is served as.
func (d *daemon) logAssumed(info image.Info) {
	if info.LooksLike != "" {
		d.log.Info("an image is served as what it is, whatever it looks like by now",
			zap.String("image", info.Name), zap.String("format", string(info.Format)),
			zap.String("because", info.FormatSource.Reason()),
			zap.String("looks_like", string(info.LooksLike)))
	}
}

// sweep removes what is left of images that are gone. Where no image was found, or they were named, nothing is known to be gone.
func (d *daemon) sweep(ctx context.Context) {
	if len(d.cfg.images) == 0 && slices.ContainsFunc(d.state.servedDisks(), func(s *servedDisk) bool { return s.image != nil }) {
		instance.Sweep(ctx, d.cfg.workDir, d.cfg.diskDir, d.cfg.owner(), d.log)
	}
}

func names(disks []*servedDisk) []string {
	all := make([]string, len(disks))
	for i, s := range disks {
		all[i] = s.name
	}
	return all
}

// isNoImage reports whether there is nothing to scan.
func isNoImage(err error) bool {
	var none *image.NoImagesError
	return errors.As(err, &none) || errors.Is(err, fs.ErrNotExist)
}

func explainScan(err error, dir string) error {
	var none *image.NoImagesError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the image directory %q does not exist: put images there, or name another directory with --%s (DISK_DIR): %w", dir, keyDiskDir, err)
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%q is no directory: name the directory that the images are in, with --%s (DISK_DIR): %w", dir, keyDiskDir, err)
	case errors.As(err, new(*image.ScanError)): // its files say what is wrong with each
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("the image directory %q cannot be read by user %d: make it readable for that user, or name another one with --%s (DISK_DIR): %w",
			dir, os.Geteuid(), keyDiskDir, err)
	case errors.As(err, &none):
		return fmt.Errorf("%w, or name another one with --%s (DISK_DIR)", err, keyDiskDir)
	}
	return err
}

// measured is what the metrics show of the disks.
func (d *daemon) measured(disks []*servedDisk) []metrics.Disk {
	var all []metrics.Disk
	for _, s := range disks {
		m := metrics.Disk{LUN: s.lun, Image: s.name, Size: s.capacity,
			Failed: func() error { return d.state.failure(s) },
			Space:  func() *disk.Usage { return d.state.space(s).now() }}
		if s.progress != nil {
			m.Progress = s.progress
		}
		all = append(all, m)
	}
	return all
}

// flushesAtOnce bounds how many disks are flushed side by side: what they wait for is storage, which takes many at once.
const flushesAtOnce = 16

// flushDisks makes every disk durable, as far as its mode promises that. A disk that hangs is an error when
// ctx ends.
func (d *daemon) flushDisks(ctx context.Context) error {
	return within(ctx, "flush", func() error {
		disks := d.state.servedDisks()
		return forAll(len(disks), flushesAtOnce, func(i int) error {
			s := disks[i]
			if s.instance == nil {
				return nil
			}
			if err := s.instance.Flush(); err != nil {
				return fmt.Errorf("LUN %d (%q): acknowledged data may be lost: %w", s.lun, s.name, err)
			}
			return nil
		})
	})
}

// closeDisks closes all of them at once: each may wait a moment for what it does in the background, and there is one time to stop in.
func (d *daemon) closeDisks(ctx context.Context) error {
	return within(ctx, "close", func() error {
		disks := d.state.takeInstances()
		return forAll(len(disks), len(disks), func(i int) error {
			if err := disks[i].instance.Close(); err != nil {
				return fmt.Errorf("LUN %d (%q): %w", disks[i].lun, disks[i].name, err)
			}
			return nil
		})
	})
}

// forAll calls f for 0 to n-1, some at once, and returns what went wrong, in their order.
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

func (d *daemon) closeImages() {
	for _, s := range d.state.servedDisks() {
		if s.image != nil {
			_ = s.image.Close() // it was only read
		}
	}
}
