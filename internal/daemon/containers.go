package daemon

import (
	"context"
	"errors"
	"path/filepath"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/adapt"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/registry"
)

// Containers are container images that become bootable disks. Each is a LUN, after the LUNs of the
// streams. The registry options are those of Streams.
type Containers struct {
	References []registry.Reference // in the order of their LUNs, each once
	// Dir keeps the levels of the disks. They count towards the size of the cache. Several daemons
	// may share it. It is made if it is missing.
	Dir string
	// Machine changes how each image is run.
	Machine machine.Options
}

// findContainers makes disks from the container images, or finds the disks of an earlier start.
func (d *Daemon) findContainers(ctx context.Context) (found []foundImage, err error) {
	if len(d.opt.Containers.References) == 0 {
		return nil, nil
	}
	if err := d.openCache(); err != nil { // the cache limits the size of the levels
		return nil, err
	}
	refused := problems.Refusal{Verb: "cannot be served"}
	for _, ref := range d.opt.Containers.References {
		f, err := d.findContainer(ctx, ref)
		if err != nil {
			refused.Add(err)
			continue
		}
		found = append(found, f)
	}
	if err := refused.Err(); err != nil {
		for _, f := range found {
			closeImages(f.image)
		}
		return nil, err
	}
	return found, nil
}

func (d *Daemon) findContainer(ctx context.Context, ref registry.Reference) (foundImage, error) {
	making := &conversion{reference: ref, log: d.log, now: time.Now}
	opt := adapt.Options{KeepDir: filepath.Join(d.keepDir(), keepName),
		Progress: &making.read, Working: making.tell, Machine: d.opt.Containers.Machine}
	for again := true; ; again = false {
		made, err := adapt.Image(ctx, d.streams.client, ref, d.opt.Containers.Dir, opt)
		if err != nil {
			return foundImage{}, err
		}
		img, err := made.Open()
		if err != nil && again {
			continue // another daemon may just have removed a level
		}
		if err != nil {
			return foundImage{}, err
		}
		d.log.Info("a container image is served as a disk", zap.Stringer("reference", ref),
			zap.String("digest", made.Digest), zap.Int("levels", len(made.Levels)),
			zap.Int("made_before", made.Cached), making.took())
		return foundImage{name: ref.String(), image: img, container: true}, nil
	}
}

// configures returns what has to be done with a disk when it is open, before a guest can read it:
// the disk of a container image gets the configuration of this start. After an error, the disk is
// closed.
func configures(s *servedDisk, opt *instance.Options) (func(*instance.Instance) error, error) {
	if !s.container {
		return func(*instance.Instance) error { return nil }, nil
	}
	config, err := adapt.Config(s.image) // the image of a complete disk is closed soon
	if err != nil {
		return nil, err
	}
	guest := new(atomic.Bool)
	if reads := opt.Reads; reads != nil {
		opt.Reads = func(off, length int64) {
			if guest.Load() { // otherwise it is not what a guest reads first
				reads(off, length)
			}
		}
	}
	return func(inst *instance.Instance) error {
		defer guest.Store(true)
		if err := adapt.Configure(inst.Disk, config); err != nil {
			return errors.Join(err, inst.Close())
		}
		return nil
	}, nil
}

// conversion logs that a disk is being made, which may take minutes at a first start.
type conversion struct {
	reference registry.Reference
	log       *zap.Logger
	now       func() time.Time
	read      registry.Progress
	began     time.Time // zero: nothing was read yet
	told      time.Time
}

// conversionInterval is the shortest time between two log lines about one conversion.
const conversionInterval = 10 * time.Second

// tell is called while layers are read.
func (c *conversion) tell() {
	now := c.now()
	message := "a container image is still becoming a disk"
	if c.began.IsZero() {
		c.began = now
		message = "a container image becomes a disk"
	} else if now.Sub(c.told) < conversionInterval {
		return
	}
	c.told = now
	done, total := c.read.Data()
	c.log.Info(message, zap.Stringer("reference", c.reference), zap.Int64("read_bytes", done),
		zap.Int64("total_bytes", total))
}

// took returns how long the conversion took, or no field if there was nothing to read.
func (c *conversion) took() zap.Field {
	if c.began.IsZero() {
		return zap.Skip()
	}
	return zap.Duration("took", c.now().Sub(c.began))
}

// checkContainers refuses options that cannot work.
func (d *Daemon) checkContainers() error {
	if len(d.opt.Containers.References) > 0 && d.opt.Containers.Dir == "" {
		return errors.New("daemon: there is no directory for the levels of container images")
	}
	return nil
}
