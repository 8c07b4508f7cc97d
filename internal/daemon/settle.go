package daemon

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/target"
)

// maxLUN is the highest LUN of the flat addressing method, 14 bits (SAM-5 4.7.7).
const maxLUN = 1<<14 - 1

// The settings of one disk that messages name, by their keys in the configuration file.
const (
	keyAccessMode = "access-mode"
	keyFormat     = "format"
	keySerial     = "serial"
	keyNAA        = "naa"
	keyReadOnly   = "read-only"
	keyUsageType  = "usage-type"
)

// diskFields are the settings of one disk, by their keys.
var diskFields = map[string]func(s DiskSettings) any{
	"lun":         func(s DiskSettings) any { return s.LUN },
	"copy-mode":   func(s DiskSettings) any { return s.CopyMode },
	keyAccessMode: func(s DiskSettings) any { return s.AccessMode },
	"size":        func(s DiskSettings) any { return s.Size },
	keyFormat:     func(s DiskSettings) any { return s.Format },
	keySerial:     func(s DiskSettings) any { return s.Identity.Serial },
	keyNAA:        func(s DiskSettings) any { return s.Identity.NAA },
	keyReadOnly:   func(s DiskSettings) any { return s.ReadOnly },
	"removable":   func(s DiskSettings) any { return s.Removable },
	keyUsageType:  func(s DiskSettings) any { return s.UsageType },
}

// Differences names the settings in which two disks differ, by their keys in the configuration
// file.
func (s DiskSettings) Differences(o DiskSettings) []string {
	var keys []string
	for key, field := range diskFields {
		if field(s) != field(o) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// resolved fills in defaults, and values that follow from other settings.
func (s DiskSettings) resolved() DiskSettings {
	if s.CopyMode == "" {
		s.CopyMode = instance.CopyClone
	}
	if s.AccessMode == "" {
		s.AccessMode = target.AccessWriteExclusive
	}
	s.ReadOnly = s.ReadOnly || s.AccessMode == target.AccessReadShared
	return s
}

// formats are the formats in the settings, by the names of images and backing files. Opening an
// image needs its format before the other settings.
func (s Settings) formats() map[string]image.Format {
	all := map[string]image.Format{}
	for name, d := range s.Disks {
		if d.Format != "" {
			all[name] = d.Format
		}
	}
	return all
}

// of returns the settings for the disk of an image, before its position among the others is known.
func (s Settings) of(name string) DiskSettings {
	if single, ok := s.Disks[name]; ok {
		return single.DiskSettings.resolved()
	}
	return s.Disk.resolved()
}

// foundImage is the image of one disk at the start.
type foundImage struct {
	name     string
	image    *image.Image  // nil: the disk is complete, and is served without one
	backing  []string      // names of its backing files
	streamed *streamedDisk // nil: it is on this machine
	// container: it was made from a container image
	container bool
}

// local reports whether the image is a file that a person has put on this machine.
func (f foundImage) local() bool { return f.streamed == nil && !f.container }

// settle decides how the disk of each image is served, or returns why it cannot be.
func (d *Daemon) settle(s Settings, found []foundImage) ([]DiskSettings, error) {
	var wrong problems.List
	settings := d.settingsFor(s, found, &wrong)
	for i, one := range settings {
		if found[i].streamed != nil && one.CopyMode == instance.CopyNone {
			wrong.Add(one.CopyModeSource, "%q lies in a registry, and cannot be served in place: "+
				"use another copy mode, such as %q", found[i].name, string(instance.CopyClone))
			continue
		}
		if found[i].image == nil {
			if found[i].streamed == nil && one.Format == image.FormatQcow2 {
				wrong.Add(fmt.Sprintf("%q of %q", SettingDisks, found[i].name),
					"key %q: the disk of a volume is always raw", keyFormat)
			}
			continue
		}
		if err := one.CopyMode.Check(found[i].image); err != nil {
			wrong.Add(one.CopyModeSource, "%v", err)
		} else if one.CopyMode == instance.CopyNone && one.UsageType != "" {
			wrong.Add(one.CopyModeSource, "%q is written in place, so it cannot lie on storage of "+
				"usage type %q: leave its %q out, or use another copy mode, such as %q",
				found[i].name, one.UsageType, keyUsageType, string(instance.CopyClone))
		}
	}
	// Check before the disks are made: a disk keeps its identity, even if the configuration file is
	// corrected.
	wanted := make([]identified, len(settings))
	for i, one := range settings {
		wanted[i] = identified{&servedDisk{lun: one.LUN, name: found[i].name}, one.Identity}
	}
	if err := d.names.checkIdentities(wanted); err != nil {
		wrong.AddError(err)
	}
	return settings, wrong.Err()
}

// settingsFor returns the settings of each image's disk. It collects everything that is wrong, such
// as settings for a disk without an image, or two disks that want the same LUN.
func (d *Daemon) settingsFor(s Settings, found []foundImage, wrong *problems.List) []DiskSettings {
	if len(found) > maxLUN {
		wrong.Add(d.names.of(SettingImageDir).Flag,
			"%d images are too many: a target has LUNs for %d", len(found), maxLUN)
		return nil
	}
	all := make([]DiskSettings, len(found))
	luns := make([]uint16, len(found))
	images := make([]string, len(found))
	for i, f := range found {
		images[i] = f.name
		all[i] = s.Disk
		if single, ok := s.Disks[f.name]; ok {
			all[i] = single.DiskSettings
		}
		all[i] = all[i].resolved()
		luns[i] = all[i].LUN
	}
	clash := func(lun uint16, a, b string) {
		wrong.Add(fmt.Sprintf("LUN %d", lun),
			"is wanted by %q and %q: give one of them another number under %v", a, b,
			d.names.of(SettingDisks))
	}
	for i, lun := range d.numbers.choose(found, luns, clash) {
		all[i].LUN = lun
	}
	for _, name := range slices.Sorted(maps.Keys(s.Disks)) {
		single := s.Disks[name]
		below := isBacking(name, found)
		switch {
		case slices.Contains(images, name) || below && single.FormatOnly:
		case below:
			wrong.Add(single.Source, "it is a backing file, not a disk of its own: only its %q "+
				"can be set", keyFormat)
		default:
			wrong.Add(single.Source, "there is no such image: the images are %s",
				strings.Join(images, ", "))
		}
	}
	return all
}

// isBacking reports whether a file is a backing file of an image.
func isBacking(name string, found []foundImage) bool {
	return slices.ContainsFunc(found, func(f foundImage) bool {
		return slices.Contains(f.backing, name)
	})
}

// identified is a disk with the identity that initiators see.
type identified struct {
	disk     *servedDisk
	identity disk.Identity
}

// checkIdentities compares open disks, because a disk keeps the identity it was given before.
func (d *Daemon) checkIdentities(disks []*servedDisk) error {
	var all []identified
	for _, s := range disks {
		if inst := d.disks.look(s).instance; inst != nil {
			all = append(all, identified{s, inst.Identity})
		}
	}
	return d.names.checkIdentities(all)
}

// checkIdentities refuses disks that initiators cannot tell apart: a multipath driver would take
// them for two paths to one disk, and write the data of each to both. It compares only what is set.
func (n names) checkIdentities(disks []identified) error {
	serials, naas := map[string]*servedDisk{}, map[[8]byte]*servedDisk{}
	var all []error
	same := func(other, s *servedDisk, what, value, key string) {
		all = append(all, fmt.Errorf("%v and %v have the same %s, %s, and would be taken for one "+
			"disk: give one of them another %q under %v",
			other, s, what, value, key, n.of(SettingDisks)))
	}
	for _, one := range disks {
		s, id := one.disk, one.identity
		if other := serials[id.Serial]; other != nil && id.Serial != "" {
			same(other, s, "serial number", id.Serial, keySerial)
		}
		if other := naas[id.NAA]; other != nil && id.NAA != [8]byte{} {
			same(other, s, "NAA identifier", hex.EncodeToString(id.NAA[:]), keyNAA)
		}
		serials[id.Serial], naas[id.NAA] = s, s
	}
	return errors.Join(all...)
}
