package upload

import (
	"context"
	"errors"
	"os"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
)

// expand replaces a foreign image by its disk.
func (s *session) expand(ctx context.Context) error {
	if err := s.fill.Drain(); err != nil {
		return err
	}
	// The next process could not tell how far this one has come.
	s.base.Packed = true
	if err := s.base.save(s.volume.Disk()); err != nil {
		return err
	}
	img, err := image.OpenUnnamed(ctx, s.name, s.fill.File(), image.Options{Foreign: true})
	if err != nil {
		return err
	}
	data := s.volume.Disk() + dataSuffix
	if err = s.fits(img.Size(), false); err == nil {
		err = expandTo(ctx, img, data+".raw")
	}
	err = errors.Join(err, img.Close())
	if err == nil {
		err = osfile.Rename(data+".raw", data, 0)
	}
	if err == nil {
		err = s.fill.Close()
	}
	if err == nil {
		err = s.open(img.Size())
	}
	s.format, s.expanded = image.FormatRaw, true
	return err
}

// expandTo writes a new file with the disk of an image.
func expandTo(ctx context.Context, img *image.Image, path string) error {
	file, err := osfile.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	to := image.NewDestination(file, func(err error) error {
		return errors.Join(err, file.Close())
	})
	return to.Finish(image.Expand(ctx, img, to, nil))
}
