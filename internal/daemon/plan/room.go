package plan

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
)

// MakeRoom calls what, which takes space. If there is too little, it removes the disks of images
// that are gone, which usually happens later, when all others are served, and calls what again. The
// error says what else would make room for a disk in this copy mode.
func (p *Plan) MakeRoom(ctx context.Context, mode instance.CopyMode, what func() error) error {
	err := what()
	if !errors.Is(err, disk.ErrNoSpace) {
		return err
	}
	kept := p.Sweep(ctx)
	if err = what(); !errors.Is(err, disk.ErrNoSpace) {
		return err
	}
	if kept > 0 {
		err = fmt.Errorf("%w; %d bytes there are disks of images that are gone or have changed: "+
			"%v removes them, with what guests wrote", err, kept,
			p.opt.Setting(&p.opt.Leftovers).With(string(instance.LeftoversRemove)))
	}
	var space *image.SpaceError
	if mode == instance.CopyClone && errors.As(err, &space) && space.Needed != 0 {
		err = fmt.Errorf("%w, or copy only what the guest writes, with %s", err,
			p.opt.Setting(&p.opt.Settings.Disk.CopyMode).With(string(instance.CopyOnWrite)))
	}
	return err
}

// Sweep removes the disks of images that are gone from their directory, or logs that they are kept,
// and returns their bytes. If no image was found there, or nothing was searched, it removes
// nothing: then it is unknown which images are gone.
func (p *Plan) Sweep(ctx context.Context) (kept int64) {
	var elsewhere []string
	for _, d := range p.Disks {
		if !d.local() {
			elsewhere = append(elsewhere, d.Name)
		}
	}
	found := func(d Disk) bool { return d.Image != nil && d.local() }
	if len(p.opt.Images.Paths) == 0 && slices.ContainsFunc(p.Disks, found) {
		for _, dir := range p.opt.WorkDirs() {
			kept += instance.Sweep(ctx, dir, p.opt.Images.Dir, elsewhere, p.opt.Owner,
				p.opt.LeftoversIn(dir), p.opt.Log)
		}
	}
	return kept
}

// sharedRoom is a file system on which several new disks get copies of their images.
type sharedRoom struct {
	dir    string // a directory on it
	images []*image.Image
}

// CheckRoom refuses to start with new disks that together do not fit on their storage. Opening a
// disk only checks whether it fits alone: then the others are still being copied, and have taken
// little of their space. A disk of an earlier start is never refused: a machine runs from it, and
// copying waits for space.
func (p *Plan) CheckRoom(ctx context.Context) error {
	rooms := map[uint64]*sharedRoom{}
	var order []*sharedRoom
	for _, d := range p.Disks {
		root := p.opt.WorkDirOf(d.DiskSettings)
		if d.Image == nil || d.CopyMode != instance.CopyClone ||
			instance.Exists(d.Dir, root, d.Name) {
			continue
		}
		if d.Dir != "" {
			root = d.Dir
		}
		dir, device, err := fileSystemOf(root)
		if err != nil {
			continue // opening the disk reports what is wrong
		}
		if rooms[device] == nil {
			rooms[device] = &sharedRoom{dir: dir}
			order = append(order, rooms[device])
		}
		rooms[device].images = append(rooms[device].images, d.Image)
	}
	for _, room := range order {
		if len(room.images) < 2 {
			continue
		}
		err := p.MakeRoom(ctx, instance.CopyClone, func() error { return room.check(ctx) })
		if err != nil {
			return err
		}
	}
	return nil
}

// check returns a *image.SpaceError if the disks do not fit together.
func (r *sharedRoom) check(ctx context.Context) error {
	available, err := image.AvailableSpace(r.dir)
	if err != nil {
		return nil // opening the disks reports what is wrong
	}
	sum := func(known int64) (needed int64, err error) {
		for _, img := range r.images {
			n, err := image.SpaceNeeded(ctx, img, known, 0)
			if err != nil {
				return 0, err
			}
			needed += min(n, math.MaxInt64-needed)
		}
		return needed, nil
	}
	needed, err := sum(math.MaxInt64)
	if err == nil && needed > available {
		needed, err = sum(0) // without looking for stored zeros, which takes time
	}
	if err != nil || needed <= available {
		return err
	}
	names := make([]string, len(r.images))
	for i, img := range r.images {
		names[i] = strconv.Quote(img.Name())
	}
	return &image.SpaceError{Dir: r.dir, What: "what is to be copied for the disks of " +
		strings.Join(names, ", ") + " together", Needed: needed, Available: available}
}

// fileSystemOf returns the nearest existing directory of a path, and the file system that it is on.
func fileSystemOf(path string) (dir string, device uint64, err error) {
	for {
		info, err := os.Stat(path)
		if parent := filepath.Dir(path); errors.Is(err, fs.ErrNotExist) && parent != path {
			path = parent // it will be made later
			continue
		}
		if err != nil {
			return "", 0, err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return "", 0, errors.ErrUnsupported
		}
		return path, uint64(st.Dev), nil
	}
}
