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

// conversionInterval is the shortest time between two log lines about one conversion, which may
// take minutes at a first start.
const conversionInterval = 10 * time.Second

func (s *Sources) findContainer(ctx context.Context, ref transport.Reference) (plan.Disk, error) {
	var read registry.Progress
	seldom := serving.NewSeldom[struct{}](conversionInterval)
	began, took := time.Now(), zap.Skip()
	opt := adapt.Options{KeepDir: filepath.Join(s.opt.KeepDir(), keepName),
		Progress: &read, Machine: s.opt.Containers.Machine,
		Working: func() { // not called if all levels exist
			took = zap.Duration("took", time.Since(began))
			if _, ok := seldom.Admit(struct{}{}, time.Now()); ok {
				done, total := read.Data()
				s.opt.Log.Info("a container image becomes a disk", zap.Stringer("reference", ref),
					zap.Int64("read_bytes", done), zap.Int64("total_bytes", total))
			}
		}}
	for again := true; ; again = false {
		made, err := adapt.Image(ctx, s.client, ref, s.opt.Containers.Dir, opt)
		if err != nil {
			return plan.Disk{}, err
		}
		img, err := made.Open()
		if err != nil && again {
			continue // another daemon may have removed a level just now
		}
		if err != nil {
			return plan.Disk{}, err
		}
		s.opt.Log.Info("a container image is served as a disk", zap.Stringer("reference", ref),
			digests(made.Digest, made.Platform), zap.Int("levels", len(made.Levels)),
			zap.Int("made_before", made.Cached), took, signedBy(made.SignedBy))
		return plan.Disk{Name: ref.String(), Image: img, SignedBy: made.SignedBy,
			Digests: func() (string, string) { return made.Digest, made.Platform },
			Config:  func() ([]byte, error) { return adapt.Config(img) }}, nil
	}
}
