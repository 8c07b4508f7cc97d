package daemon

import (
	"maps"
	"path/filepath"
	"slices"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/instance"
)

// numbers are the LUNs of earlier starts. They stay with the images: a guest must not find another
// disk under its number because an image came or went. Each disk keeps its own, see
// instance.LUNOf.
type numbers struct {
	of    map[string]uint16 // by the name of an image that is here
	taken map[uint16]string // by disks whose images are not here, and by volumes: what has it
}

// recallNumbers finds the LUNs of earlier starts. dirs are the directories of persistent disks
// without a usage type.
func (d *Daemon) recallNumbers(found []foundImage, dirs []string) error {
	n := numbers{of: map[string]uint16{}, taken: map[uint16]string{}}
	persistent := d.opt.PersistentDir != ""
	here := map[string]bool{}
	users := map[uint16]bool{}
	for i, f := range found {
		base := dirs[i]
		if base == "" {
			base = instance.DirIn(d.opt.WorkDir, f.name)
		}
		here[filepath.Base(instance.DirIn("", f.name))] = true
		dir, err := d.homeOf(f.name, d.opt.Settings.of(f.name), base)
		if err != nil {
			continue // settled says what is wrong
		}
		lun, err := instance.LUNOf(dir, persistent)
		if err != nil {
			return err
		}
		if users[lun] {
			continue // somebody has copied a disk; the first one keeps the number
		}
		if lun != 0 {
			n.of[f.name], users[lun] = lun, true
		}
	}
	for _, dir := range d.diskRoots() {
		// Images that are named one by one are a set of their own each time.
		if len(d.opt.Images.Paths) > 0 ||
			!persistent && d.leftovers(dir) != instance.LeftoversKeep {
			continue
		}
		kept, err := instance.LUNs(dir, d.opt.Owner, persistent)
		if err != nil {
			return err
		}
		for _, name := range slices.Sorted(maps.Keys(kept)) {
			if !here[name] && n.taken[kept[name]] == "" {
				n.taken[kept[name]] = filepath.Join(dir, name)
			}
		}
	}
	if d.volumes != nil && d.volumes.manager != nil {
		for _, v := range d.volumes.manager.List() {
			if v.Record.LUN != 0 {
				n.taken[v.Record.LUN] = "the volume " + v.Record.Name
			}
		}
	}
	d.numbers = n
	return nil
}

// diskRoots are the directories that hold directories of disks.
func (d *Daemon) diskRoots() []string {
	roots := d.workDirs()
	if d.opt.PersistentDir != "" {
		roots[0] = d.opt.PersistentDir
	}
	return roots
}

// rememberNumbers logs what is new since an earlier start, and keeps the numbers for Reload.
func (d *Daemon) rememberNumbers(found []foundImage, settings []DiskSettings) {
	first := len(d.numbers.of) == 0 && len(d.numbers.taken) == 0
	now := map[string]uint16{}
	for i, f := range found {
		lun := settings[i].LUN
		now[f.name] = lun
		switch before, known := d.numbers.of[f.name]; {
		case first || known && before == lun:
		case known:
			d.log.Warn("the LUN of an image is another one than at the earlier start",
				zap.String("image", f.name), zap.Uint16("lun", lun), zap.Uint16("was", before))
		default:
			d.log.Info("an image is new: the LUNs of the others stay as they are",
				zap.String("image", f.name), zap.Uint16("lun", lun))
		}
	}
	for _, lun := range slices.Sorted(maps.Keys(d.numbers.taken)) {
		d.log.Info("a LUN is kept for a disk that is not among the images",
			zap.Uint16("lun", lun), zap.String("disk", d.numbers.taken[lun]))
	}
	d.numbers.of = now
}

// choose gives each image the LUN that it is to have: the one that is set; or that of an earlier
// start; or its place among the images, unless a disk of an earlier start has that one, and then
// the lowest free one. Two images that want one number are reported to clash.
func (n numbers) choose(found []foundImage, set []uint16, clash func(lun uint16, a, b string)) (
	all []uint16,
) {
	all = slices.Clone(set)
	users := map[uint16]string{}
	take := func(i int, lun uint16) {
		if other, taken := users[lun]; taken {
			clash(lun, other, found[i].name)
		}
		users[lun], all[i] = found[i].name, lun
	}
	isSet := map[uint16]bool{}
	for i, lun := range set {
		if lun != 0 {
			take(i, lun)
			isSet[lun] = true
		}
	}
	for i, f := range found {
		if lun := n.of[f.name]; all[i] == 0 && lun != 0 {
			take(i, lun)
		}
	}
	lowest := uint16(1)
	for i := range found {
		if all[i] != 0 {
			continue
		}
		free := func(lun uint16) bool { return users[lun] == "" && n.taken[lun] == "" }
		place := uint16(i + 1)
		if free(place) || isSet[place] {
			take(i, place)
			continue
		}
		for ; lowest < maxLUN && !free(lowest); lowest++ {
		}
		take(i, lowest)
	}
	return all
}
