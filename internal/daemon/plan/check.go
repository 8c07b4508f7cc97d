package plan

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/problems"
)

// Check refuses directories that cannot hold disks, before anything is looked for, and logs the
// storages of usage types.
func Check(opt *options.Options) error {
	if err := checkDirectories(opt); err != nil {
		return err
	}
	if err := checkMade(opt); err != nil {
		return err
	}
	if err := checkUsageTypes(opt); err != nil {
		return err
	}
	for _, name := range opt.UsageTypes.Names() {
		dir := opt.UsageTypes[name]
		fields := []zap.Field{zap.String("name", name), zap.String("directory", dir)}
		if free, err := image.AvailableSpace(dir); err == nil {
			fields = append(fields, zap.Int64("free_bytes", free))
		}
		opt.Log.Info("usage type", fields...)
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && int64(st.Type) == unix.OVERLAYFS_SUPER_MAGIC {
			opt.Log.Warn("the directory of a usage type is in the container's own layer, not on a "+
				"volume", zap.String("name", name), zap.String("directory", dir))
		}
	}
	return nil
}

// place is a path that a setting names.
type place struct {
	field any // the setting's field
	path  string
}

// checkDirectories refuses to keep disks in the directory of images. The next start would take
// their files for images, and ask the person to remove files that the disks need.
func checkDirectories(opt *options.Options) error {
	images := []string{opt.Images.Dir}
	if paths := opt.Images.Paths; len(paths) > 0 {
		images = make([]string, len(paths))
		for i, path := range paths {
			images[i] = filepath.Dir(path)
		}
	}
	var wrong problems.List
	places := []place{{&opt.PersistentDir, opt.PersistentDir}, {&opt.WorkDir, opt.WorkDir}}
	for _, name := range opt.UsageTypes.Names() {
		places = append(places, place{&opt.UsageTypes, opt.UsageTypes[name]})
	}
	for _, kept := range places {
		same := func(dir string) bool { return options.SameDirectory(dir, kept.path) }
		if slices.ContainsFunc(images, same) {
			wrong.Add(opt.Setting(kept.field).String(), "%q is also the directory of the images "+
				"(%s): name another one, which may be a directory in it", kept.path,
				opt.Setting(&opt.Images.Dir).Flag)
		}
	}
	if len(opt.Images.Paths) > 0 { // files next to a named image are not images
		return wrong.Err()
	}
	// A file that a killed daemon leaves there would stop the next start, too.
	files := []place{{&opt.RecordBoot, opt.RecordBoot},
		{&opt.ControlSocket, opt.ControlSocket}}
	if opt.VhostUserDir != "" {
		files = append(files, place{&opt.VhostUserDir, filepath.Join(opt.VhostUserDir, "1.sock")})
	}
	if opt.Volumes != nil {
		files = append(files, place{&opt.Volumes.Dir, filepath.Join(opt.VolumesDir(), "lock")})
	}
	for _, p := range opt.NBD {
		files = append(files, place{&opt.NBD, p.Socket})
	}
	for _, made := range files {
		hidden := strings.HasPrefix(filepath.Base(made.path), ".") // no image
		if made.path != "" && !hidden &&
			options.SameDirectory(opt.Images.Dir, filepath.Dir(made.path)) {
			wrong.Add(opt.Setting(made.field).String(), "%q is in the directory of the images "+
				"(%s), where a start takes each file for one: name another place", made.path,
				opt.Setting(&opt.Images.Dir).Flag)
		}
	}
	return wrong.Err()
}

// checkMade refuses directories that cannot exist, and would be made if they are missing. An error
// of a file in them would not name the setting.
func checkMade(opt *options.Options) error {
	check := func(field any, dir string, writes bool) error {
		at := dir                     // or the nearest existing directory above it
		st, err := os.Stat(at + "/.") // fails, too, if its files are out of reach
		for errors.Is(err, fs.ErrNotExist) && at != filepath.Dir(at) {
			at = filepath.Dir(at)
			st, err = os.Stat(at + "/.")
		}
		if err == nil && !st.IsDir() || errors.Is(err, unix.ENOTDIR) {
			return fmt.Errorf("%q is not a directory, nor can one be made there: name another one "+
				"with %v", dir, opt.Setting(field))
		}
		if err == nil && writes {
			err = osfile.CheckWritable(at)
		}
		if err != nil {
			return fmt.Errorf("the directory %q cannot be used by user %d: %w: give that user the "+
				"right to, or name another one with %v", dir, os.Geteuid(),
				osfile.WithoutPath(err), opt.Setting(field))
		}
		return nil
	}
	if opt.PersistentDir == "" { // with one, the work directory need not be usable
		if err := check(&opt.WorkDir, opt.WorkDir, false); err != nil {
			return err
		}
	}
	if opt.VhostUserDir == "" {
		return nil
	}
	return check(&opt.VhostUserDir, opt.VhostUserDir, true)
}

// checkUsageTypes refuses directories that cannot have disks. So a mistake shows at the start, not
// only when the first disk chooses the type.
func checkUsageTypes(opt *options.Options) error {
	var wrong problems.List
	for _, name := range opt.UsageTypes.Names() {
		dir := opt.UsageTypes[name]
		source := fmt.Sprintf("%v, type %q", opt.Setting(&opt.UsageTypes), name)
		switch st, err := os.Stat(dir); {
		case errors.Is(err, fs.ErrNotExist):
			wrong.Add(source, "the directory %q does not exist: mount its storage there, or name "+
				"the directory where it is mounted", dir)
			continue
		case err != nil:
			wrong.Add(source, "the directory %q cannot be used: %v", dir, err)
			continue
		case !st.IsDir():
			wrong.Add(source, "%q is not a directory", dir)
			continue
		}
		if err := osfile.CheckWritable(dir); err != nil {
			wrong.Add(source, "user %d cannot write in it: %v", os.Geteuid(), err)
		}
	}
	return wrong.Err()
}
