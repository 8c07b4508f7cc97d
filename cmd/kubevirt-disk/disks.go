package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/target"
)

// servedDisk is an image on its way to be a LUN.
type servedDisk struct {
	lun      uint16
	name     string
	format   disk.Format
	size     int64
	image    *disk.Image
	progress *disk.Progress // nil: nothing is expanded in this mode
	instance *disk.Instance // guarded by state.mu while pages are served; nil: not made yet, or closed
}

func (d *daemon) readOnly() bool { return d.cfg.accessMode == target.AccessReadShared }

// openDisks validates every image before it makes the first disk, so that a bad one is known at once.
func (d *daemon) openDisks(ctx context.Context) error {
	images, err := disk.ScanDir(d.cfg.diskDir, disk.ImageOptions{})
	if err != nil {
		return explainScan(err, d.cfg.diskDir)
	}
	disks := make([]*servedDisk, len(images))
	var unsuitable problems
	for i, img := range images {
		disks[i] = &servedDisk{lun: uint16(i + 1), name: img.Name(), format: img.Info().Format, size: img.Size(), image: img}
		if d.cfg.copyMode == disk.CopyClone {
			disks[i].progress = new(disk.Progress)
		}
		if err := d.cfg.copyMode.Check(img); err != nil {
			unsuitable.add(d.cfg.copyModeSource, "%v", err)
		}
	}
	d.state.setDisks(disks)
	if err := unsuitable.err(); err != nil {
		return err
	}
	d.metrics.SetDisks(d.measured(disks))
	d.state.set(metrics.StateExpanding)
	// One after the other: each expansion uses every core.
	for _, s := range disks {
		instance, err := disk.Open(ctx, s.image, disk.OpenOptions{
			Mode:     d.cfg.copyMode,
			WorkDir:  d.cfg.workDir,
			ReadOnly: d.readOnly(),
			Log:      d.log.With(zap.Uint16("lun", s.lun)),
			Progress: s.progress,
		})
		if err != nil {
			return fmt.Errorf("LUN %d (%s): %w", s.lun, s.name, err)
		}
		d.state.opened(s, instance)
	}
	return nil
}

func explainScan(err error, dir string) error {
	var none *disk.NoImagesError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the image directory %s does not exist: put images there, or name another directory with --%s (DISK_DIR): %w", dir, keyDiskDir, err)
	case errors.As(err, &none):
		return fmt.Errorf("%w, or name another one with --%s (DISK_DIR)", err, keyDiskDir)
	}
	return err
}

// measured is what the metrics show of the disks.
func (d *daemon) measured(disks []*servedDisk) []metrics.Disk {
	var all []metrics.Disk
	for _, s := range disks {
		m := metrics.Disk{LUN: s.lun, Image: s.name, Size: s.size, Failed: func() error { return d.state.failure(s) }}
		if s.progress != nil {
			m.Progress = s.progress
		}
		all = append(all, m)
	}
	return all
}

// flushDisks makes every disk durable, as far as its mode promises that. A disk that hangs is an error when
// ctx ends.
func (d *daemon) flushDisks(ctx context.Context) error {
	return within(ctx, "flush", func() error {
		var all []error
		for _, s := range d.state.servedDisks() {
			if s.instance == nil {
				continue
			}
			if err := s.instance.Flush(); err != nil {
				all = append(all, fmt.Errorf("LUN %d (%s): acknowledged data may be lost: %w", s.lun, s.name, err))
			}
		}
		return errors.Join(all...)
	})
}

func (d *daemon) closeDisks(ctx context.Context) error {
	return within(ctx, "close", func() error {
		var all []error
		for s, instance := range d.state.takeInstances() {
			if err := instance.Close(); err != nil {
				all = append(all, fmt.Errorf("LUN %d (%s): %w", s.lun, s.name, err))
			}
		}
		return errors.Join(all...)
	})
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
		// They were only read.
		_ = s.image.Close()
	}
}
