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
	dir    string // a directory on it
	images []*image.Image
	taken  []int64 // bytes of each image's disk from an earlier start
	fresh  bool    // one of the disks is new
}

// checkRoom refuses to start with new disks that do not fit together on the storage that they
// share. Opening a disk only checks whether it fits alone: at that time the others are still being
// copied, and have taken little of their room. The same goes for disks that an earlier start has
// copied in part. Their rest counts, too, but without a new disk they are never refused: machines
// run from them, and may have freed data that was copied.
func (d *Daemon) checkRoom(ctx context.Context) error {
	rooms := map[uint64]*sharedRoom{}
	var order []*sharedRoom
	for _, s := range d.initial {
		settings := d.disks.look(s).settings
		root := d.workDir(settings)
		if s.image == nil || settings.CopyMode != instance.CopyClone {
			continue // it takes no space
		}
		taken, there := instance.Taken(s.dir, root, s.name)
		if s.dir != "" {
			root = s.dir
		}
		dir, device, err := fileSystemOf(root)
		if err != nil {
			continue // opening the disk reports what is wrong
		}
		if rooms[device] == nil {
			rooms[device] = &sharedRoom{dir: dir}
			order = append(order, rooms[device])
		}
		rooms[device].add(s.image, taken, !there)
	}
	for _, room := range order {
		if len(room.images) < 2 || !room.fresh {
			continue
		}
		err := room.check(ctx)
		if errors.As(err, new(*image.SpaceError)) {
			kept := d.sweep(ctx) // disks of images that are gone may take the room
			err = d.explainKept(room.check(ctx), kept)
		}
		if err != nil {
			return d.explainSpace(err, instance.CopyClone)
		}
	}
	return nil
}

func (r *sharedRoom) add(img *image.Image, taken int64, fresh bool) {
	if taken == math.MaxInt64 && !fresh {
		return // it already has all its space
	}
	if fresh {
		taken = 0
	}
	r.images, r.taken = append(r.images, img), append(r.taken, taken)
	r.fresh = r.fresh || fresh
}

// check returns a *image.SpaceError if the disks do not fit together.
func (r *sharedRoom) check(ctx context.Context) error {
	available, err := image.AvailableSpace(r.dir)
	if err != nil {
		return nil // opening the disks reports what is wrong
	}
	sum := func(known int64) (needed int64, err error) {
		for i, img := range r.images {
			n, err := image.SpaceNeeded(ctx, img, known, 0)
			if err != nil {
				return 0, err
			}
			needed += min(max(n-r.taken[i], 0), math.MaxInt64-needed)
		}
		return needed, nil
	}
	needed, err := sum(math.MaxInt64)
	if err == nil && needed > available {
		needed, err = sum(0) // without stored zeros, which take time to find
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
