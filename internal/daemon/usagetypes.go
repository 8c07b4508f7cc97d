package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/pages"
)

// UsageTypes are storages that disks can choose for their writable part: absolute paths of
// directories, by the names of the types. The directories exist.
type UsageTypes map[string]string

// Dir returns the directory of a type. The error for an unknown type lists the known ones.
func (u UsageTypes) Dir(name string) (string, error) {
	if dir, ok := u[name]; ok {
		return dir, nil
	}
	if len(u) == 0 {
		return "", fmt.Errorf("usage type %q is unknown: there are none", name)
	}
	return "", fmt.Errorf("usage type %q is unknown: use one of %s", name,
		strings.Join(u.names(), ", "))
}

func (u UsageTypes) names() []string { return slices.Sorted(maps.Keys(u)) }

// of returns the type whose directory holds the directory of a disk, or "".
func (u UsageTypes) of(dir string) string {
	for _, name := range u.names() {
		if sameDirectory(u[name], filepath.Dir(dir)) {
			return name
		}
	}
	return ""
}

// checkUsageTypes refuses directories that cannot hold disks. So a mistake shows at the start, not
// only when the first disk chooses the type.
func (d *Daemon) checkUsageTypes() error {
	var wrong problems.List
	for _, name := range d.opt.UsageTypes.names() {
		dir := d.opt.UsageTypes[name]
		source := fmt.Sprintf("%v, type %q", d.names.of(SettingUsageType), name)
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
		err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
		if err != nil {
			wrong.Add(source, "user %d cannot write in %q: %v", os.Geteuid(), dir, err)
		}
	}
	return wrong.Err()
}

// settled decides where each disk lies, or returns why it cannot lie there. usual are the
// directories of persistent disks without a type.
func (d *Daemon) settled(found []foundImage, usual []string, settings []DiskSettings) error {
	homes := instance.Homes{Base: d.opt.WorkDir, Owner: d.opt.Owner,
		Durable: d.opt.EphemeralFlush, Kept: d.leftovers(d.opt.WorkDir) != instance.LeftoversRemove}
	for _, name := range d.opt.UsageTypes.names() {
		homes.Roots = append(homes.Roots, d.opt.UsageTypes[name])
	}
	if d.opt.PersistentDir != "" {
		homes.Base, homes.Persistent, homes.Kept = d.opt.PersistentDir, true, true
	}
	var refused problems.Refusal
	refused.Verb = "have disks that lie elsewhere"
	for i, f := range found {
		if settings[i].CopyMode == instance.CopyNone {
			continue // it is the image's own file
		}
		base := usual[i]
		if base == "" {
			base = instance.DirIn(d.opt.WorkDir, f.name)
		}
		dir, err := d.homeOf(f.name, settings[i], base)
		if err == nil {
			err = homes.Settle(f.name, base, dir)
		}
		if err != nil {
			refused.Add(d.explainElsewhere(err))
			continue
		}
		if usual[i] != "" {
			usual[i] = dir
		}
		d.homes = append(d.homes, func() error { return homes.Made(f.name, base, dir) })
	}
	return refused.Err()
}

// homeOf returns the directory of a disk, which is base unless its settings choose a type.
func (d *Daemon) homeOf(name string, s DiskSettings, base string) (string, error) {
	if s.UsageType == "" {
		return base, nil
	}
	root, err := d.opt.UsageTypes.Dir(s.UsageType)
	if err != nil {
		return "", fmt.Errorf("%q: %w", name, err)
	}
	return instance.DirIn(root, name), nil
}

// workDir is the directory that holds the directories of ephemeral disks with these settings.
func (d *Daemon) workDir(s DiskSettings) string {
	if dir, ok := d.opt.UsageTypes[s.UsageType]; ok && s.UsageType != "" {
		return dir
	}
	return d.opt.WorkDir
}

// leftovers says what happens to the disks in a directory of ephemeral disks whose images are gone
// or have changed. In a container's own directory nothing else would ever free their space.
func (d *Daemon) leftovers(dir string) instance.Leftovers {
	if d.opt.Leftovers != "" {
		return d.opt.Leftovers
	}
	if dir != d.opt.WorkDir || d.opt.WorkDirNamed {
		return instance.LeftoversKeep
	}
	return instance.LeftoversRemove
}

// workDirs are all directories that hold directories of ephemeral disks.
func (d *Daemon) workDirs() []string {
	dirs := []string{d.opt.WorkDir}
	for _, name := range d.opt.UsageTypes.names() {
		dir := d.opt.UsageTypes[name]
		known := func(other string) bool { return sameDirectory(dir, other) }
		if !slices.ContainsFunc(dirs, known) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// explainElsewhere says which setting lets a disk be found again.
func (d *Daemon) explainElsewhere(err error) error {
	var elsewhere *instance.ElsewhereError
	if !errors.As(err, &elsewhere) {
		return err
	}
	key := fmt.Sprintf("%q under %v", keyUsageType, d.names.of(SettingDisks))
	if name := d.opt.UsageTypes.of(elsewhere.There); name != "" {
		return fmt.Errorf("%w: its %s was %s", err, key, name)
	}
	inBase := func(dir string) bool {
		return sameDirectory(dir, d.opt.WorkDir) || sameDirectory(dir, d.opt.PersistentDir)
	}
	if inBase(elsewhere.There) || inBase(filepath.Dir(elsewhere.There)) {
		return fmt.Errorf("%w: it had no %s", err, key)
	}
	return fmt.Errorf("%w: no usage type has that place now, see %v", err,
		d.names.of(SettingUsageType))
}

// usageType is a storage that the pages report.
type usageType struct {
	name, dir string
	space     *gauge[disk.Usage]
}

// freeIn reports the free space in a directory, for a gauge.
type freeIn string

func (dir freeIn) Usage() (disk.Usage, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(string(dir), &st); err != nil {
		return disk.Usage{}, err
	}
	unit := st.Frsize
	if unit <= 0 {
		unit = st.Bsize
	}
	return disk.Usage{Available: int64(st.Bavail) * unit}, nil
}

func (d *Daemon) newUsageTypes() (all []usageType) {
	for _, name := range d.opt.UsageTypes.names() {
		dir := d.opt.UsageTypes[name]
		all = append(all, usageType{name, dir, &gauge[disk.Usage]{question: freeIn(dir).Usage}})
	}
	return all
}

func (d *Daemon) usageTypeGauges() []*gauge[disk.Usage] {
	gauges := make([]*gauge[disk.Usage], len(d.usageTypes))
	for i, u := range d.usageTypes {
		gauges[i] = u.space
	}
	return gauges
}

// announceUsageTypes logs the storages, and warns of a directory without a storage of its own.
func (d *Daemon) announceUsageTypes() {
	for _, u := range d.usageTypes {
		fields := []zap.Field{zap.String("name", u.name), zap.String("directory", u.dir)}
		if space, err := freeIn(u.dir).Usage(); err == nil {
			fields = append(fields, zap.Int64("free_bytes", space.Available))
		}
		d.log.Info("usage type", fields...)
		var st unix.Statfs_t
		if unix.Statfs(u.dir, &st) == nil && int64(st.Type) == unix.OVERLAYFS_SUPER_MAGIC {
			d.log.Warn("the directory of a usage type is in the container's own layer, not on a "+
				"volume", zap.String("name", u.name), zap.String("directory", u.dir))
		}
	}
}

// usageTypeStatus sums up the space of the disks of each type. It is part of Status, after its LUNs
// are complete.
func (d *Daemon) usageTypeStatus(luns []pages.LUNStatus) (all []pages.UsageTypeStatus) {
	spaces := readAll(d.usageTypeGauges())
	for i, u := range d.usageTypes {
		status := pages.UsageTypeStatus{Name: u.name, Directory: u.dir, LUNs: []uint16{}}
		used := int64(0)
		for _, lun := range luns {
			if lun.UsageType != u.name {
				continue
			}
			status.LUNs = append(status.LUNs, lun.LUN)
			if lun.Space != nil {
				used += lun.Space.Used
			}
		}
		if space := spaces[i]; space != nil {
			status.Space = &pages.Space{Used: used, Free: space.Available}
		}
		all = append(all, status)
	}
	return all
}

// measureUsageTypes updates the metrics about free space.
func (d *Daemon) measureUsageTypes() {
	for _, u := range d.usageTypes {
		d.metrics.AddUsageType(metrics.UsageType{Name: u.name, Space: func() *disk.Usage {
			space := u.space.latest()
			if space == nil {
				return nil
			}
			sum := disk.Usage{Available: space.Available}
			for _, s := range d.disks.served() {
				now := d.disks.look(s)
				if now.settings.UsageType != u.name {
					continue
				}
				if of := now.space.latest(); of != nil {
					sum.Used += of.Used
				}
			}
			return &sum
		}})
	}
}
