package plan

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/problems"
)

// home is the place of a disk.
type home struct {
	usual string // if it chooses nothing
	dir   string // by its settings
	err   error  // why its settings cannot be used, or nil
}

// place decides the directory of each disk. single says that a volume has the persistent directory.
func (p *Plan) place(single bool) (err error) {
	volume := p.opt.PersistentDir
	dirs := make([]string, len(p.Disks))
	here := func(d Disk) bool { return d.AlreadyOpen == nil }
	if volume != "" && slices.ContainsFunc(p.Disks, here) {
		if single {
			return fmt.Errorf("the persistent directory %q belongs to a volume made without "+
				"an image: remove the images (%v), or delete that volume",
				volume, p.opt.Setting(&p.opt.Images.Dir))
		}
		var names []string
		for _, d := range p.Disks { // those of other servers are the last ones
			if here(d) {
				names = append(names, d.Name)
			}
		}
		all, err := instance.PersistentDirs(volume, names)
		if err != nil {
			return explainPersistent(p.opt, err)
		}
		copy(dirs, all)
	}
	p.homes = make([]home, len(p.Disks))
	for i := range p.Disks {
		d, h := &p.Disks[i], &p.homes[i]
		if d.AlreadyOpen != nil {
			continue
		}
		if h.usual = dirs[i]; volume == "" {
			h.usual = instance.DirIn(p.opt.WorkDir, d.Name)
		}
		h.dir = h.usual
		if s := p.opt.Settings.Of(d.Name); s.CopyMode != instance.CopyNone {
			h.dir, h.err = p.opt.HomeOf(d.Name, s, h.usual)
		}
		if volume != "" {
			d.Dir = h.dir
		}
	}
	return nil
}

// allHomes are the directories that may have the disks.
func (p *Plan) allHomes() instance.Homes {
	homes := instance.Homes{Base: p.opt.WorkDir, Owner: p.opt.Owner, Durable: p.opt.EphemeralFlush,
		Kept: p.opt.LeftoversIn(p.opt.WorkDir) != instance.LeftoversRemove}
	for _, name := range p.opt.UsageTypes.Names() {
		homes.Roots = append(homes.Roots, p.opt.UsageTypes[name])
	}
	if p.opt.PersistentDir != "" {
		homes.Base, homes.Persistent, homes.Kept = p.opt.PersistentDir, true, true
	}
	return homes
}

// checkHomes refuses disks that are in another place than their settings say.
func (p *Plan) checkHomes() error {
	homes := p.allHomes()
	refused := problems.Refusal{Verb: "have disks that lie elsewhere"}
	for i, d := range p.Disks {
		if d.CopyMode == instance.CopyNone {
			continue // the image's own file
		}
		err := p.homes[i].err
		if err == nil {
			err = homes.Settle(d.Name, p.homes[i].usual, p.homes[i].dir)
		}
		if err != nil {
			refused.Add(p.explainPlace(err))
		}
	}
	return refused.Err()
}

// explainPlace says which setting finds a disk again.
func (p *Plan) explainPlace(err error) error {
	var other *instance.OtherPlaceError
	if !errors.As(err, &other) {
		return err
	}
	key := fmt.Sprintf("%q under %v", p.opt.Setting(&p.opt.Settings.Disk.UsageType).Key,
		p.opt.Setting(&p.opt.Settings.Disks))
	if name := usageTypeOf(p.opt.UsageTypes, other.There); name != "" {
		return fmt.Errorf("%w: its %s was %s", err, key, name)
	}
	inBase := func(dir string) bool {
		return options.SameDirectory(dir, p.opt.WorkDir) ||
			options.SameDirectory(dir, p.opt.PersistentDir)
	}
	if inBase(other.There) || inBase(filepath.Dir(other.There)) {
		return fmt.Errorf("%w: it had no %s", err, key)
	}
	return fmt.Errorf("%w: no usage type has that place now, see %v", err,
		p.opt.Setting(&p.opt.UsageTypes))
}

// usageTypeOf returns the type whose directory holds the directory of a disk, or "".
func usageTypeOf(u options.UsageTypes, dir string) string {
	for _, name := range u.Names() {
		if options.SameDirectory(u[name], filepath.Dir(dir)) {
			return name
		}
	}
	return ""
}
