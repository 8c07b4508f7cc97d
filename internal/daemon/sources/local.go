package sources

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/problems"
)

// findLocal finds the images on this machine. There need not be any if there are images elsewhere.
func (s *Sources) findLocal(single bool) (found []plan.Disk, err error) {
	images, err := s.openImages()
	volume := s.opt.PersistentDir
	switch {
	case err == nil:
		for _, img := range images {
			info := img.Info()
			s.logAssumed(info)
			f := plan.Disk{Name: img.Name(), Image: img}
			for _, b := range info.BackingChain {
				f.Backing = append(f.Backing, b.Name)
			}
			found = append(found, f)
		}
		return found, nil
	case len(s.opt.Images.Paths) > 0:
		return nil, err
	case s.opt.Images.Named && errors.Is(err, fs.ErrNotExist): // other disks would get its LUNs
	case isNoImage(err) && (s.opt.Remote() || single): // it is served with the other volumes
		return nil, nil
	case isNoImage(err) && volume != "" && instance.HasPersistent(volume):
		s.opt.Log.Info("there is no image: the disk of the volume is served without one",
			zap.String("directory", volume))
		return []plan.Disk{{Name: instance.PersistentName}}, nil
	case isNoImage(err) && s.opt.Volumes != nil:
		return nil, nil
	}
	return nil, s.explainScan(err)
}

// hasReferences reports whether the options name images by reference.
func (s *Sources) hasReferences() bool {
	return len(s.opt.Streams.References)+len(s.opt.Containers.References) > 0
}

// openImages opens the images that are served from the start, or none.
func (s *Sources) openImages() ([]*image.Image, error) {
	opt := image.Options{Formats: s.opt.Settings.Formats(), Hold: true}
	if len(s.opt.Images.Paths) == 0 {
		opt.PassedOver = func(why *image.Error) {
			s.opt.Log.Info("a file beside the images is no disk image, so it is not served",
				zap.String("file", why.Name), zap.String("because", why.Reason))
		}
		return image.ScanDir(s.opt.Images.Dir, opt)
	}
	var images []*image.Image
	refused := problems.Refusal{Verb: "cannot be served"}
	paths := map[string]string{}
	opt.Named = true
	for _, path := range s.opt.Images.Paths {
		name := filepath.Base(path)
		if other, twice := paths[name]; twice && filepath.Clean(other) == filepath.Clean(path) {
			refused.Add(fmt.Errorf("%q is named twice: leave one out", path))
			continue
		} else if twice {
			refused.Add(fmt.Errorf("%q and %q have the same name, but names must be unique: "+
				"rename one of them, or leave one out", other, path))
			continue
		}
		paths[name] = path
		img, err := image.Open(path, opt)
		if err != nil {
			refused.Add(err)
			continue
		}
		images = append(images, img)
	}
	if err := refused.Err(); err != nil {
		for _, img := range images {
			_ = img.Close() // it was opened for reading
		}
		return nil, err
	}
	return images, nil
}

// logAssumed warns of an image that looks like another format than the assumed one.
func (s *Sources) logAssumed(info image.Info) {
	if info.LooksLike != "" {
		s.opt.Log.Info("an image is served in its known format, although its content looks like "+
			"another one",
			zap.String("image", info.Name), zap.String("format", string(info.Format)),
			zap.String("because", info.FormatSource.Reason()),
			zap.String("looks_like", string(info.LooksLike)))
	}
}

// Local opens an image of this machine by its name, or returns nil if there is none.
func (s *Sources) Local(name string) (*image.Image, error) {
	opt := s.opt.Images
	path := ""
	for _, named := range opt.Paths {
		if filepath.Base(named) == name {
			path = named
		}
	}
	if len(opt.Paths) == 0 && opt.Dir != "" && filepath.IsLocal(name) &&
		filepath.Base(name) == name && !strings.HasPrefix(name, ".") {
		path = filepath.Join(opt.Dir, name)
	}
	if path == "" {
		return nil, nil
	}
	img, err := image.Open(path, image.Options{Formats: s.opt.Settings.Formats(), Hold: true})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return img, err
}

// isNoImage reports whether the error says that there is no image.
func isNoImage(err error) bool {
	return errors.As(err, new(*image.NoImagesError)) || errors.Is(err, fs.ErrNotExist)
}

func (s *Sources) explainScan(err error) error {
	dir, name := s.opt.Images.Dir, s.opt.Setting(&s.opt.Images.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the image directory %q does not exist: put images there, or name "+
			"another directory with %v", dir, name)
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%q is not a directory: name the directory that the images are in, with "+
			"%v", dir, name)
	case errors.As(err, new(*image.ScanError)): // each of its files has an error
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("the image directory %q cannot be read by user %d: make it readable for "+
			"that user, or name another one with %v: %w", dir, os.Geteuid(), name, err)
	case errors.As(err, new(*image.NoImagesError)):
		return fmt.Errorf("%w, or name another one with %v", err, name)
	}
	return err
}
