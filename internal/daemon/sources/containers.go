package sources

import (
	"context"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/adapt"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
)

// findContainers makes disks from the container images, or finds the disks of an earlier start.
func (s *Sources) findContainers(ctx context.Context) (found []plan.Disk, err error) {
	refused := problems.Refusal{Verb: "cannot be served"}
	defer s.begin(serving.Source{})
	for _, ref := range s.opt.Containers.References {
		s.begin(s.Source(ref))
		f, err := s.findContainer(ctx, ref)
		if err != nil {
			refused.Add(err)
			continue
		}
		found = append(found, f)
	}
	if err := refused.Err(); err != nil {
		plan.CloseImages(found)
		return nil, err
	}
	return found, nil
}

func (s *Sources) findContainer(ctx context.Context, ref transport.Reference) (plan.Disk, error) {
	making := &conversion{reference: ref, log: s.opt.Log, now: time.Now}
	opt := adapt.Options{KeepDir: filepath.Join(s.opt.KeepDir(), keepName),
		Progress: &making.read, Working: making.tell, Machine: s.opt.Containers.Machine}
	for again := true; ; again = false {
		made, err := adapt.Image(ctx, s.client, ref, s.opt.Containers.Dir, opt)
		if err != nil {
			return plan.Disk{}, err
		}
		img, err := made.Open()
		if err != nil && again {
			continue // another daemon may just have removed a level
		}
		if err != nil {
			return plan.Disk{}, err
		}
		s.opt.Log.Info("a container image is served as a disk", zap.Stringer("reference", ref),
			digests(made.Digest, made.Platform),
			zap.Int("levels", len(made.Levels)), zap.Int("made_before", made.Cached),
			making.took(), signedBy(made.SignedBy))
		return plan.Disk{Name: ref.String(), Image: img, SignedBy: made.SignedBy,
			Digests: func() (string, string) { return made.Digest, made.Platform },
			Config:  func() ([]byte, error) { return adapt.Config(img) }}, nil
	}
}

// conversion logs that a disk is being made, which may take minutes at a first start.
type conversion struct {
	reference transport.Reference
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
