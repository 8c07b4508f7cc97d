package instance

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// Sweep removes the disks in a work directory whose images are gone, and logs how much space it
// freed. With LeftoversKeep it only logs these disks. It returns how many bytes are kept: of these
// disks, and of those that were set aside.
//
// It removes only a directory that certainly is the same owner's: its state is intact, it names the
// owner and an image that is neither in imageDir nor among others, and it is not locked. Call Sweep
// after the images of this run were opened, so that a missing directory of images does not look
// empty. Files that do not belong to a disk stay. When ctx ends, Sweep stops early; the next call
// goes on.
func Sweep(ctx context.Context, workDir, imageDir string, others []string, owner string,
	leftovers Leftovers, log *zap.Logger) (kept int64) {
	entries, err := os.ReadDir(workDir)
	// if all disks are on volumes, there may be no work directory
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("the work directory was not searched for disks of images that are gone",
			zap.Error(err))
	}
	if err == nil {
		workDir, err = osfile.Resolved(workDir)
	}
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if ctx.Err() != nil {
			return kept
		}
		if !e.IsDir() {
			continue
		}
		d := workDirOf(workDir, e.Name())
		if leftovers == LeftoversKeep {
			kept += d.tellLeftovers(imageDir, others, owner, log)
			continue
		}
		if err := d.sweep(imageDir, others, owner, log); err != nil {
			log.Warn("the disk of an image that is gone could not be removed",
				zap.String("directory", d.path), zap.Error(err))
		}
	}
	return kept
}

// tellLeftovers logs that a disk is kept although its image is gone. It returns how many bytes no
// guest uses.
func (d *diskDir) tellLeftovers(imageDir string, others []string, owner string,
	log *zap.Logger,
) (bytes int64) {
	if image, gone := d.orphaned(imageDir, others, owner, log); gone {
		bytes = usedIn(d.path)
		log.Warn("the image of a disk is gone: the disk is kept, with what was written to it, and "+
			"is served again when an image of that name is back",
			zap.String("image", image), zap.String("directory", d.path), zap.Int64("bytes", bytes),
			zap.String("to_remove_it", howToRemove))
		return bytes
	}
	all, _ := d.asides() // only messages need it
	for _, a := range all {
		bytes += usedIn(a.path)
	}
	return bytes
}

// known returns the state of a disk, or of one that was set aside if no other was made since.
func (d *diskDir) known() (*state, error) {
	s, err := loadState(d.state())
	if !errors.Is(err, fs.ErrNotExist) {
		return s, err
	}
	all, _ := d.asides()
	for _, a := range all {
		if s, err := loadState(a.state()); err == nil {
			return s, nil
		}
	}
	return nil, err
}

// orphaned reports whether the owner left the directory for an image that is gone.
func (d *diskDir) orphaned(imageDir string, others []string, owner string, log *zap.Logger) (
	image string, gone bool,
) {
	s, err := d.known()
	if err != nil || escapeName(s.Image) != filepath.Base(d.path) {
		return "", false
	}
	if slices.ContainsFunc(others, func(name string) bool { return storedName(name) == s.Image }) {
		return "", false
	}
	if _, err := os.Lstat(filepath.Join(imageDir, s.Image)); !errors.Is(err, fs.ErrNotExist) {
		return "", false
	}
	if s.Owner != owner {
		log.Info("a disk in the work directory has no image here and is kept because another "+
			"daemon may need it", zap.String("directory", d.path),
			zap.String("last_served_by", s.Owner), zap.String("this_is", owner))
		return "", false
	}
	return s.Image, true
}

func (d *diskDir) sweep(imageDir string, others []string, owner string, log *zap.Logger) error {
	if _, gone := d.orphaned(imageDir, others, owner, log); !gone {
		return nil // without a lock: a lock would disturb another user
	}
	if err := osfile.CheckOwner(d.path); err != nil {
		return err
	}
	name := filepath.Join(d.path, durable.LockName)
	lock, err := durable.AcquireExistingLock(name, d.path)
	if errors.As(err, new(*durable.LockedError)) || errors.Is(err, durable.ErrLockGone) {
		return nil
	} else if err != nil {
		return err
	}
	defer lock.Close()
	// Another process may have used the disk in between.
	image, gone := d.orphaned(imageDir, others, owner, log)
	if !gone {
		return nil
	}
	before := usedIn(d.path)
	// The state is removed last. If this call is killed, the next one finds the directory by it.
	_, err = d.removeAsides()
	err = errors.Join(err, d.clearUnits(), osfile.Remove(d.disk()))
	if err == nil { // not before the disk: without its layers it has other content
		err = d.clearLayers(nil)
	}
	for _, file := range []string{d.disk(), d.liveMap(), d.durableMap(),
		d.state() + durable.SpareSuffix, d.state()} {
		if err == nil {
			err = errors.Join(osfile.Remove(file+durable.PartialSuffix), osfile.Remove(file))
		}
	}
	if err != nil {
		return err
	}
	// Another process that has opened the lock file notices that the file has lost its name. If the
	// directory has other files, it stays.
	if err := osfile.Remove(name); err != nil {
		return err
	}
	if err := osfile.Remove(d.path); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	log.Info("removed the disk of an image that is gone", zap.String("image", image),
		zap.String("directory", d.path), zap.Int64("bytes", before-usedIn(d.path)))
	return nil
}

// usedIn returns how many bytes of storage the files in a directory use.
func usedIn(dir string) (used int64) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && unix.Lstat(path, &st) == nil {
			used += st.Blocks * osfile.StatBlock
		}
		return nil // only the log needs it
	})
	return used
}
