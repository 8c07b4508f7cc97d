package options

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kubevirt.io/disk/disk/instance"
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
		strings.Join(u.Names(), ", "))
}

// Names are sorted.
func (u UsageTypes) Names() []string { return slices.Sorted(maps.Keys(u)) }

// HomeOf returns the directory of a disk, which is base unless its settings choose a type.
func (o *Options) HomeOf(name string, s DiskSettings, base string) (string, error) {
	if s.UsageType == "" {
		return base, nil
	}
	root, err := o.UsageTypes.Dir(s.UsageType)
	if err != nil {
		return "", fmt.Errorf("%q: %w", name, err)
	}
	return instance.DirIn(root, name), nil
}

// WorkDirOf is the directory for ephemeral disks with these settings. Each disk has a directory in
// it.
func (o *Options) WorkDirOf(s DiskSettings) string {
	if dir, ok := o.UsageTypes[s.UsageType]; ok && s.UsageType != "" {
		return dir
	}
	return o.WorkDir
}

// LeftoversIn says what happens to the disks in a directory of ephemeral disks if their images are
// gone or have changed. In a container's own directory nothing else would ever free their space.
func (o *Options) LeftoversIn(dir string) instance.Leftovers {
	if o.Leftovers != "" {
		return o.Leftovers
	}
	if dir != o.WorkDir || o.WorkDirNamed {
		return instance.LeftoversKeep
	}
	return instance.LeftoversRemove
}

// WorkDirs are all directories for ephemeral disks.
func (o *Options) WorkDirs() []string {
	dirs := []string{o.WorkDir}
	for _, name := range o.UsageTypes.Names() {
		dir := o.UsageTypes[name]
		known := func(other string) bool { return SameDirectory(dir, other) }
		if !slices.ContainsFunc(dirs, known) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// KeepDir is a directory that lives as long as the disks.
func (o *Options) KeepDir() string {
	if o.PersistentDir != "" {
		return o.PersistentDir
	}
	return o.WorkDir
}

// volumesName is the directory of the volumes, inside that of the disks.
const volumesName = ".volumes"

// VolumesDir is the directory of the volumes.
func (o *Options) VolumesDir() string {
	switch {
	case o.Volumes.Dir != "":
		return o.Volumes.Dir
	case o.PersistentDir != "":
		return filepath.Join(o.PersistentDir, volumesName)
	}
	return filepath.Join(o.WorkDir, volumesName)
}

// SameDirectory reports whether two names lead to the same existing directory.
func SameDirectory(a, b string) bool {
	first, err := os.Stat(a)
	if err != nil {
		return false
	}
	second, err := os.Stat(b)
	return err == nil && os.SameFile(first, second)
}
