package plan

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
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/serving"
)

// Settle returns the settings of each image's disk, or why it cannot be served.
func (p *Plan) Settle(s options.Settings) ([]options.DiskSettings, error) {
	found := p.Disks
	var wrong problems.List
	settings := p.settingsFor(s, &wrong)
	for i, one := range settings {
		if found[i].AlreadyOpen != nil {
			p.checkRemote(i, one, s.Disk, &wrong)
			continue
		}
		if found[i].Far != nil && one.CopyMode == instance.CopyNone {
			wrong.Add(one.CopyModeSource, "%q lies in a registry, and cannot be served in place: "+
				"use another copy mode, such as %q", found[i].Name, string(instance.CopyClone))
			continue
		}
		if found[i].Image == nil {
			if found[i].Far == nil && one.Format == image.FormatQcow2 {
				wrong.Add(fmt.Sprintf("%q of %q", p.opt.Setting(&p.opt.Settings.Disks).Key,
					found[i].Name), "key %q: the disk of a volume is always raw",
					p.opt.Setting(&p.opt.Settings.Disk.Format).Key)
			}
			continue
		}
		if err := one.CopyMode.Check(found[i].Image); err != nil {
			wrong.Add(one.CopyModeSource, "%v", err)
		} else if one.CopyMode == instance.CopyNone && one.UsageType != "" {
			wrong.Add(one.CopyModeSource, "%q is written in place, so it cannot lie on storage of "+
				"usage type %q: leave its %q out, or use another copy mode, such as %q",
				found[i].Name, one.UsageType,
				p.opt.Setting(&p.opt.Settings.Disk.UsageType).Key, string(instance.CopyClone))
		}
	}
	// Check before the disks are opened: a disk keeps its identity, even if the settings are
	// corrected later.
	wanted := make([]Disk, len(settings))
	for i, one := range settings {
		one.Identity = one.Identity.Or(p.numbers.ids[found[i].Name])
		wanted[i] = Disk{Name: found[i].Name, DiskSettings: one}
	}
	if err := CheckIdentities(p.opt, wanted); err != nil {
		wrong.AddError(err)
	}
	return settings, wrong.Err()
}

// checkRemote finds settings of a disk that its own server decides. The block size may be the
// common setting of all disks, which is for images.
func (p *Plan) checkRemote(i int, s, common options.DiskSettings, wrong *problems.List) {
	at := fmt.Sprintf("the disk %q", p.Disks[i].Name)
	if s.Size != 0 {
		wrong.Add(at, "is on another server: enlarge it there, and leave %q out",
			p.opt.Setting(&p.opt.Settings.Disk.Size).Key)
	}
	if s.Identity != (disk.Identity{}) {
		wrong.Add(at, "is on another server, where it has its serial number: leave that out here")
	}
	elsewhere := func(set bool, field any) {
		if set {
			wrong.Add(at, "is on another server, which says what it is and where it lies: leave "+
				"%q out", p.opt.Setting(field).Key)
		}
	}
	of := &p.opt.Settings.Disk
	elsewhere(s.BlockSize != common.BlockSize && s.BlockSize != p.Disks[i].AlreadyOpen.BlockSize,
		&of.BlockSize)
	elsewhere(s.Format != "" && s.Format != image.FormatRaw, &of.Format)
	elsewhere(s.UsageType != "", &of.UsageType)
}

// settingsFor returns the settings of each image's disk. It collects everything that is wrong, such
// as settings for a disk without an image, or two disks that want the same LUN.
func (p *Plan) settingsFor(s options.Settings, wrong *problems.List) (all []options.DiskSettings) {
	found := p.Disks
	if len(found) > serving.MaxNumber {
		wrong.Add(p.opt.Setting(&p.opt.Images.Dir).Flag,
			"%d images are too many: a target has LUNs for %d", len(found), serving.MaxNumber)
		return nil
	}
	all = make([]options.DiskSettings, len(found))
	luns := make([]uint16, len(found))
	images := make([]string, len(found))
	for i, f := range found {
		images[i] = f.Name
		all[i] = s.Disk
		if single, ok := s.Disks[f.Name]; ok {
			all[i] = single.DiskSettings
		}
		all[i] = all[i].Resolved()
		if f.AlreadyOpen != nil {
			all[i].CopyMode = instance.CopyNone
		}
		luns[i] = all[i].LUN
	}
	clash := func(lun uint16, a, b string) {
		wrong.Add(fmt.Sprintf("LUN %d", lun), "is wanted by %q and %q: give one of them another "+
			"number under %v", a, b, p.opt.Setting(&p.opt.Settings.Disks))
	}
	for i, lun := range p.numbers.choose(found, luns, clash) {
		all[i].LUN = lun
	}
	for _, name := range slices.Sorted(maps.Keys(s.Disks)) {
		single := s.Disks[name]
		below := isBacking(name, found)
		switch {
		case slices.Contains(images, name) || below && single.FormatOnly:
		case below:
			wrong.Add(single.Source, "it is a backing file, not a disk of its own: only its %q "+
				"can be set", p.opt.Setting(&p.opt.Settings.Disk.Format).Key)
		default:
			wrong.Add(single.Source, "there is no such image: the images are %s",
				strings.Join(images, ", "))
		}
	}
	return all
}

// isBacking reports whether a file is a backing file of an image.
func isBacking(name string, found []Disk) bool {
	return slices.ContainsFunc(found, func(f Disk) bool {
		return slices.Contains(f.Backing, name)
	})
}

// CheckIdentities refuses disks that initiators cannot distinguish: a multipath driver would take
// them for two paths to one disk, and write the data of each to both. It compares only known
// identities.
func CheckIdentities(opt *options.Options, disks []Disk) error {
	serials, naas := map[string]*Disk{}, map[[8]byte]*Disk{}
	var all []error
	same := func(other, d *Disk, what, value string, field any) {
		all = append(all, fmt.Errorf("%v and %v have the same %s, %s, and would be taken for one "+
			"disk: give one of them another %q under %v",
			other, d, what, value, opt.Setting(field).Key, opt.Setting(&opt.Settings.Disks)))
	}
	for i := range disks {
		d, id := &disks[i], disks[i].Identity
		if other := serials[id.Serial]; other != nil && id.Serial != "" {
			same(other, d, "serial number", id.Serial, &opt.Settings.Disk.Identity.Serial)
		}
		if other := naas[id.NAA]; other != nil && id.NAA != [8]byte{} {
			same(other, d, "NAA identifier", hex.EncodeToString(id.NAA[:]),
				&opt.Settings.Disk.Identity.NAA)
		}
		serials[id.Serial], naas[id.NAA] = d, d
	}
	return errors.Join(all...)
}
