package plan

import (
	"maps"
	"path/filepath"
	"slices"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/serving"
)

// numbers are the LUNs of earlier starts. They stay with the images: a guest must not find another
// disk under its number because an image was added or removed. Each disk's state has its number and
// its identity, see instance.KnownAs.
type numbers struct {
	// the numbers by the names of images that exist
	byImage map[string]uint16
	ids     map[string]disk.Identity

	away  map[uint16]string // of disks whose images are gone, and their names
	taken map[uint16]string // those of away, and of volumes
}

// recallNumbers finds the LUNs of earlier starts. volumes are the LUNs of volumes.
func (p *Plan) recallNumbers(volumes map[uint16]string) (numbers, error) {
	n := numbers{byImage: map[string]uint16{}, taken: map[uint16]string{},
		ids: map[string]disk.Identity{}}
	persistent := p.opt.PersistentDir != ""
	here := map[string]bool{}
	users := map[uint16]bool{}
	for i, d := range p.Disks {
		here[filepath.Base(instance.DirIn("", d.Name))] = true
		if d.AlreadyOpen != nil || p.homes[i].err != nil { // checkHomes reports what is wrong
			continue
		}
		lun, id, err := instance.KnownAs(p.homes[i].dir, persistent)
		if err != nil {
			return n, err
		}
		n.ids[d.Name] = id
		if users[lun] {
			continue // a copied disk; the first one keeps the number
		}
		if lun != 0 {
			n.byImage[d.Name], users[lun] = lun, true
		}
	}
	for _, dir := range p.diskRoots() {
		// Images that are named one by one are a new set each time.
		if len(p.opt.Images.Paths) > 0 ||
			!persistent && p.opt.LeftoversIn(dir) != instance.LeftoversKeep {
			continue
		}
		kept, err := instance.LUNs(dir, p.opt.Owner, persistent)
		if err != nil {
			return n, err
		}
		for _, name := range slices.Sorted(maps.Keys(kept)) {
			if !here[name] && n.taken[kept[name]] == "" {
				n.taken[kept[name]] = filepath.Join(dir, name)
			}
		}
	}
	n.away = maps.Clone(n.taken)
	for lun, name := range volumes {
		n.taken[lun] = "the volume " + name
	}
	return n, nil
}

// Kept are the numbers of disks whose images are gone.
func (p *Plan) Kept() map[uint16]string { return p.numbers.away }

// diskRoots are the directories that have directories of disks.
func (p *Plan) diskRoots() []string {
	roots := p.opt.WorkDirs()
	if p.opt.PersistentDir != "" {
		roots[0] = p.opt.PersistentDir
	}
	return roots
}

// logNumbers logs what is new since an earlier start, and stores the numbers for Settle.
func (p *Plan) logNumbers() {
	first := len(p.numbers.byImage) == 0 && len(p.numbers.taken) == 0
	now := map[string]uint16{}
	for _, d := range p.Disks {
		if d.AlreadyOpen != nil {
			continue // its place decides; two servers may call their disks the same
		}
		now[d.Name] = d.LUN
		switch before, known := p.numbers.byImage[d.Name]; {
		case first || known && before == d.LUN:
		case known:
			p.opt.Log.Warn("the LUN of an image is another one than at the earlier start",
				zap.String("image", d.Name), zap.Uint16("lun", d.LUN), zap.Uint16("was", before))
		default:
			p.opt.Log.Info("an image is new: the LUNs of the others stay as they are",
				zap.String("image", d.Name), zap.Uint16("lun", d.LUN))
		}
	}
	for _, lun := range slices.Sorted(maps.Keys(p.numbers.taken)) {
		p.opt.Log.Info("a LUN is kept for a disk that is not among the images",
			zap.Uint16("lun", lun), zap.String("disk", p.numbers.taken[lun]))
	}
	p.numbers.byImage = now
}

// choose gives each image its LUN: the one in the settings; or that of an earlier start; or its
// position among the images, unless a disk of an earlier start has that number, and then the lowest
// free one. If two images want one number, choose calls clash.
func (n numbers) choose(found []Disk, set []uint16, clash func(lun uint16, a, b string)) (
	all []uint16,
) {
	all = slices.Clone(set)
	users := map[uint16]string{}
	take := func(i int, lun uint16) {
		if other, taken := users[lun]; taken {
			clash(lun, other, found[i].Name)
		}
		users[lun], all[i] = found[i].Name, lun
	}
	isSet := map[uint16]bool{}
	for i, lun := range set {
		if lun != 0 {
			take(i, lun)
			isSet[lun] = true
		}
	}
	for i, f := range found {
		if lun := n.byImage[f.Name]; all[i] == 0 && lun != 0 {
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
		for ; lowest < serving.MaxNumber && !free(lowest); lowest++ {
		}
		take(i, lowest)
	}
	return all
}
