package daemon

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
)

// sharedRoom is a file system on which several new disks get copies of their images.
type sharedRoom struct {
	dir    string // on it
	images []*image.Image
}

// checkRoom refuses to start with new disks that do not fit together on the storage that they
// share. Each alone may fit, and that is all that is found out when it is opened: the others are
// still being copied then, and have taken little of their room.
func (d *Daemon) checkRoom(ctx context.Context) error {
	rooms := map[uint64]*sharedRoom{}
	var order []*sharedRoom
	for _, s := range d.initial {
		settings := d.disks.look(s).settings
		root := d.workDir(settings)
		if s.image == nil || settings.CopyMode != instance.CopyClone ||
			instance.HasDisk(s.dir, root, s.name) {
			continue // it takes nothing, or has room already
		}
		if s.dir != "" {
			root = s.dir
		}
		dir, device, err := fileSystemOf(root)
		if err != nil {
			continue // opening the disk says what is wrong
		}
		if rooms[device] == nil {
			rooms[device] = &sharedRoom{dir: dir}
			order = append(order, rooms[device])
		}
		rooms[device].images = append(rooms[device].images, s.image)
	}
	for _, room := range order {
		if len(room.images) < 2 {
			continue
		}
		err := room.check(ctx)
		if errors.As(err, new(*image.SpaceError)) {
			d.sweep(ctx) // it may be taken by the disks of images that are gone
			err = room.check(ctx)
		}
		if err != nil {
			return d.explainSpace(err, instance.CopyClone)
		}
	}
	return nil
}

// check returns a *image.SpaceError if the disks do not fit together.
func (r *sharedRoom) check(ctx context.Context) error {
	available, err := image.AvailableSpace(r.dir)
	if err != nil {
		return nil // opening the disks says what is wrong
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
		needed, err = sum(0) // without stored zeros, which have to be looked for
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

// fileSystemOf returns the directory that is there of a path, and which file system it is on.
func fileSystemOf(path string) (dir string, device uint64, err error) {
	for {
		info, err := os.Stat(path)
		if parent := filepath.Dir(path); errors.Is(err, fs.ErrNotExist) && parent != path {
			path = parent // it is made later
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
