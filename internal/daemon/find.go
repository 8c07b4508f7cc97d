package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/problems"
)

// find finds the images, and how each is served.
func (d *Daemon) find(ctx context.Context) (disks []Disk, err error) {
	if err := d.checkDirectories(); err != nil {
		return nil, err
	}
	if err := d.checkUsageTypes(); err != nil {
		return nil, err
	}
	d.announceUsageTypes()
	var found []foundImage
	defer func() {
		if err != nil {
			for _, f := range found {
				closeImages(f.image)
			}
		}
	}()
	if found, err = d.findLocal(); err != nil {
		return nil, err
	}
	streamed, err := d.findStreams(ctx)
	if err != nil {
		return nil, err
	}
	found = append(found, streamed...)
	containers, err := d.findContainers(ctx)
	if err != nil {
		return nil, err
	}
	found = append(found, containers...)
	volume := d.opt.PersistentDir
	dirs := make([]string, len(found))
	if volume != "" && len(found) > 0 {
		if d.hasSingle() {
			return nil, fmt.Errorf("the persistent directory %q belongs to a volume made without "+
				"an image: remove the images (%v), or delete that volume",
				volume, d.names.of(SettingImageDir))
		}
		names := make([]string, len(found))
		for i, f := range found {
			names[i] = f.name
		}
		if dirs, err = instance.PersistentDirs(volume, names); err != nil {
			return nil, d.explainVolume(err)
		}
	}
	for i := range found {
		if found[i].streamed != nil {
			if err := d.openStreamed(ctx, &found[i], dirs[i]); err != nil {
				return nil, err
			}
		}
	}
	if err := d.recallNumbers(found, dirs); err != nil {
		return nil, err
	}
	settings, err := d.settle(d.opt.Settings, found)
	if err != nil {
		return nil, err
	}
	if err := d.settled(found, dirs, settings); err != nil {
		return nil, err
	}
	d.rememberNumbers(found, settings)
	d.found = found
	for i, f := range found {
		one := Disk{Name: f.name, Image: f.image, Dir: dirs[i], DiskSettings: settings[i],
			container: f.container}
		if f.streamed != nil {
			one.CopyAfter = f.streamed.stream.Booted(f.streamed.disk.Name)
		}
		disks = append(disks, one)
	}
	return disks, nil
}

// findLocal finds the images on this machine. It is no error if there are none but others exist.
func (d *Daemon) findLocal() (found []foundImage, err error) {
	images, err := d.openImages()
	volume := d.opt.PersistentDir
	switch {
	case err == nil:
		for _, img := range images {
			info := img.Info()
			d.logAssumed(info)
			f := foundImage{name: img.Name(), image: img}
			for _, b := range info.BackingChain {
				f.backing = append(f.backing, b.Name)
			}
			found = append(found, f)
		}
		return found, nil
	case len(d.opt.Images.Paths) > 0:
		return nil, err
	case isNoImage(err) && d.hasReferences():
		return nil, nil
	case isNoImage(err) && d.hasSingle():
		return nil, nil // it is served with the other volumes
	case isNoImage(err) && volume != "" && instance.HasPersistent(volume):
		d.log.Info("there is no image: the disk of the volume is served without one",
			zap.String("directory", volume))
		return []foundImage{{name: instance.PersistentName}}, nil
	case isNoImage(err) && d.volumes != nil:
		return nil, nil
	}
	return nil, d.explainScan(err)
}

// hasReferences reports whether the options name images by reference.
func (d *Daemon) hasReferences() bool {
	return len(d.opt.Streams.References)+len(d.opt.Containers.References) > 0
}

// checkDirectories refuses to keep disks in the directory of images. The next start would take
// their files for images, and ask the person to remove files that the disks need.
func (d *Daemon) checkDirectories() error {
	images := []string{d.opt.Images.Dir}
	if paths := d.opt.Images.Paths; len(paths) > 0 {
		images = make([]string, len(paths))
		for i, path := range paths {
			images[i] = filepath.Dir(path)
		}
	}
	var wrong problems.List
	type place struct {
		setting Setting
		dir     string
	}
	places := []place{{SettingPersistentDir, d.opt.PersistentDir}, {SettingWorkDir, d.opt.WorkDir}}
	for _, name := range d.opt.UsageTypes.names() {
		places = append(places, place{SettingUsageType, d.opt.UsageTypes[name]})
	}
	for _, kept := range places {
		same := func(dir string) bool { return sameDirectory(dir, kept.dir) }
		if slices.ContainsFunc(images, same) {
			wrong.Add(d.names.of(kept.setting).String(),
				"%q is also the directory of the images (%s): name another one, which may be a "+
					"directory in it",
				kept.dir, d.names.of(SettingImageDir).Flag)
		}
	}
	return wrong.Err()
}

// sameDirectory reports whether two names lead to the same existing directory.
func sameDirectory(a, b string) bool {
	first, err := os.Stat(a)
	if err != nil {
		return false
	}
	second, err := os.Stat(b)
	return err == nil && os.SameFile(first, second)
}

// openImages opens the images that are served from the start, or none.
func (d *Daemon) openImages() ([]*image.Image, error) {
	opt := image.Options{Formats: d.opt.Settings.formats()}
	if len(d.opt.Images.Paths) == 0 {
		opt.PassedOver = func(why *image.Error) {
			d.log.Info("a file beside the images is not served, because it is none",
				zap.String("file", why.Name), zap.String("because", why.Reason))
		}
		return image.ScanDir(d.opt.Images.Dir, opt)
	}
	var images []*image.Image
	refused := problems.Refusal{Verb: "cannot be served"}
	paths := map[string]string{}
	opt.Named = true
	for _, path := range d.opt.Images.Paths {
		name := filepath.Base(path)
		if other, twice := paths[name]; twice {
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
		closeImages(images...)
		return nil, err
	}
	return images, nil
}

// closeImages closes images; it ignores nil.
func closeImages(images ...*image.Image) {
	for _, img := range images {
		if img != nil {
			_ = img.Close() // it was opened for reading
		}
	}
}

// logAssumed warns of an image that looks like another format than the one it is served as.
func (d *Daemon) logAssumed(info image.Info) {
	if info.LooksLike != "" {
		d.log.Info("an image is served in its known format, although its content looks like "+
			"another one",
			zap.String("image", info.Name), zap.String("format", string(info.Format)),
			zap.String("because", info.FormatSource.Reason()),
			zap.String("looks_like", string(info.LooksLike)))
	}
}

// sweep removes the disks of images that are gone from their directory, or logs that they are kept,
// and returns their bytes. If no image was found there, or nothing was searched, it removes
// nothing: then nothing is known to be gone.
func (d *Daemon) sweep(ctx context.Context) (kept int64) {
	var elsewhere []string
	for _, f := range d.found {
		if !f.local() {
			elsewhere = append(elsewhere, f.name)
		}
	}
	found := func(f foundImage) bool { return f.image != nil && f.local() }
	if len(d.opt.Images.Paths) == 0 && slices.ContainsFunc(d.found, found) {
		for _, dir := range d.workDirs() {
			kept += instance.Sweep(ctx, dir, d.opt.Images.Dir, elsewhere, d.opt.Owner,
				d.leftovers(dir), d.log)
		}
	}
	return kept
}

// explainKept says that disks which nobody uses take space that is missing.
func (d *Daemon) explainKept(err error, kept int64) error {
	if err == nil || kept == 0 || !errors.Is(err, disk.ErrNoSpace) {
		return err
	}
	return fmt.Errorf("%w; %d bytes there are disks of images that are gone or have changed: %v "+
		"removes them, with what guests wrote", err, kept,
		d.names.of(SettingLeftovers).with(string(instance.LeftoversRemove)))
}

// isNoImage reports whether the error says that there is no image.
func isNoImage(err error) bool {
	var none *image.NoImagesError
	return errors.As(err, &none) || errors.Is(err, fs.ErrNotExist)
}

func (d *Daemon) explainScan(err error) error {
	dir, name := d.opt.Images.Dir, d.names.of(SettingImageDir)
	var none *image.NoImagesError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the image directory %q does not exist: put images there, or name "+
			"another directory with %v: %w", dir, name, err)
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf(
			"%q is not a directory: name the directory that the images are in, with %v: %w",
			dir, name, err)
	case errors.As(err, new(*image.ScanError)): // its files say what is wrong with each
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("the image directory %q cannot be read by user %d: make it readable for "+
			"that user, or name another one with %v: %w", dir, os.Geteuid(), name, err)
	case errors.As(err, &none):
		return fmt.Errorf("%w, or name another one with %v", err, name)
	}
	return err
}
