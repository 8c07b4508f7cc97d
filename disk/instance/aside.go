package instance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// Leftovers says what happens to an ephemeral disk, with the guest's writes, if its image is gone
// or the disk does not fit the image any more.
type Leftovers string

const (
	// LeftoversKeep sets such a disk aside, until its image is back or a person removes it.
	LeftoversKeep Leftovers = "keep"
	// LeftoversRemove removes such a disk.
	LeftoversRemove Leftovers = "remove"
)

// ParseLeftovers parses a setting. "" lets the daemon choose by the kind of the directory.
func ParseLeftovers(s string) (Leftovers, error) {
	switch l := Leftovers(s); l {
	case "", LeftoversKeep, LeftoversRemove:
		return l, nil
	}
	return "", fmt.Errorf("%q is unknown: use %s or %s", s, LeftoversKeep, LeftoversRemove)
}

// asidePrefix begins the names of subdirectories in the directory of an ephemeral disk. Each has
// the files of one disk that was set aside, under their usual names.
const asidePrefix = "aside-"

// howToRemove is advice about a disk that is kept but not served.
const howToRemove = "remove that directory, or start once with --leftovers=remove"

// asides are the directories of the disks that were set aside, the latest first.
func (d *diskDir) asides() (all []*diskDir, err error) {
	if d.persistent {
		return nil, nil
	}
	entries, err := os.ReadDir(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range slices.Backward(entries) {
		if e.IsDir() && strings.HasPrefix(e.Name(), asidePrefix) {
			all = append(all, workDirOf(d.path, e.Name()))
		}
	}
	return all, err
}

// removeAsides removes the disks that were set aside.
func (d *diskDir) removeAsides() (freed int64, err error) {
	all, err := d.asides()
	for _, a := range all {
		used := usedIn(a.path)
		if err = errors.Join(err, osfile.RemoveAll(a.path)); err == nil {
			freed += used
		}
	}
	return freed, err
}

// setAside moves the disk's files into a subdirectory, and returns its path, or "" if there is no
// disk. The state is moved first and the disk last. So if a kill interrupts it, the subdirectory
// has a state but no disk, and settleAsides moves the rest.
func (d *diskDir) setAside() (path string, err error) {
	if there, err := present(d.disk()); err != nil || !there {
		return "", err
	}
	for range 1000 { // several names, because the clock may stand still or go back
		name := asidePrefix + time.Now().UTC().Format("20060102T150405.000000")
		path = filepath.Join(d.path, name)
		if err = osfile.MakeDir(path); !errors.Is(err, fs.ErrExist) {
			break
		}
	}
	if err != nil {
		return "", err
	}
	to := workDirOf(d.path, filepath.Base(path))
	names, err := d.files()
	if err == nil {
		err = moveAll(d, to, append([]string{d.stateFile}, names...))
	}
	return path, err
}

// takeBack moves the files of a disk that was set aside back to their place, where no disk is. The
// disk is moved first and the state last: see setAside.
func (d *diskDir) takeBack(from *diskDir) error {
	if err := d.clear(); err != nil {
		return err
	}
	names, err := from.files()
	if err != nil {
		return err
	}
	slices.Reverse(names)
	if err := moveAll(from, d, append(names, from.stateFile)); err != nil {
		return err
	}
	return osfile.RemoveAll(from.path)
}

// settleAsides completes the moves of a killed process: if the state of a disk was set aside, it
// moves the rest. A disk without a state would not be used.
func (d *diskDir) settleAsides() error {
	all, err := d.asides()
	if err != nil || len(all) == 0 {
		return err
	}
	if there, err := present(d.state()); err != nil || there {
		return err
	}
	for _, a := range all {
		if there, err := present(a.disk()); err != nil {
			return err
		} else if there {
			continue
		}
		if there, err := present(a.state()); err != nil {
			return err
		} else if !there {
			continue
		}
		names, err := d.files()
		if err != nil {
			return err
		}
		return moveAll(d, a, names)
	}
	return nil
}

// files are the names of the disk's files without its state. The disk is the last one.
func (d *diskDir) files() (names []string, err error) {
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, d.diskFile+".") && !strings.HasSuffix(name,
			durable.PartialSuffix) {
			names = append(names, name)
		}
	}
	return append(names, d.diskFile), err
}

// moveAll moves the named files that exist, in this order.
func moveAll(from, to *diskDir, names []string) error {
	for _, name := range names {
		err := osfile.Move(filepath.Join(from.path, name), filepath.Join(to.path, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return errors.Join(durable.SyncDir(to.path, (*os.File).Sync),
		durable.SyncDir(from.path, (*os.File).Sync))
}

// makeWay removes the disk of an earlier start, or sets it aside.
func (o *opening) makeWay(reason string) error {
	if o.opt.Leftovers == LeftoversKeep && !o.dir.persistent {
		path, err := o.dir.setAside()
		if err != nil {
			return fmt.Errorf("the disk %q cannot be set aside, and is not removed: %w",
				o.dir.disk(), o.spaceError(err))
		}
		if path != "" {
			o.log.Warn("the existing disk does not fit any more: it is set aside, with what was "+
				"written to it, and is found again when its image is back",
				zap.String("reason", reason), zap.String("set_aside", path),
				zap.Int64("bytes", usedIn(path)), zap.String("to_remove_it", howToRemove))
		}
	}
	return o.dir.clear()
}

// lookAside looks for a disk that was set aside and fits the image, before a new one is made.
func (o *opening) lookAside(ctx context.Context, instead verdict) verdict {
	all, err := o.dir.asides()
	if err != nil {
		return verdict{what: refuse, err: o.unread(err)}
	}
	for _, a := range all {
		if there, err := present(a.disk()); err != nil {
			return verdict{what: refuse, err: o.unread(err)}
		} else if !there {
			continue
		}
		other := *o
		other.dir = a
		v := other.judge(ctx)
		if v.what == refuse {
			return v
		}
		if v.what != keep {
			continue
		}
		if err := o.makeWay(instead.reason); err != nil {
			return verdict{what: refuse, err: err}
		}
		if err := o.dir.takeBack(a); err != nil {
			return verdict{what: refuse, err: err}
		}
		o.log.Info("the disk that was set aside fits the image: serving it again, with what was "+
			"written to it", zap.String("was_in", a.path))
		return v
	}
	return instead
}

// settleLeftovers removes the disks that were set aside, or logs that they are there.
func (o *opening) settleLeftovers() {
	if o.opt.Leftovers != LeftoversKeep {
		freed, err := o.dir.removeAsides()
		if err != nil {
			o.log.Warn("a disk that was set aside could not be removed", zap.Error(err))
		}
		if freed > 0 {
			o.log.Info("removed the disks that were set aside",
				zap.String("directory", o.dir.path), zap.Int64("bytes", freed))
		}
		return
	}
	all, err := o.dir.asides()
	if err != nil {
		o.log.Warn("the disks that were set aside could not be listed", zap.Error(err))
	}
	for _, a := range all {
		o.log.Info("a disk that does not fit the image is set aside, with what was written to it",
			zap.String("set_aside", a.path), zap.Int64("bytes", usedIn(a.path)),
			zap.String("to_remove_it", howToRemove))
	}
}

// lost reports whether a disk without a file once had one. The state of an earlier version does not
// say so, but has fields that were saved only after the file was made.
func (s *state) lost() bool {
	identified := func(f image.Fingerprint) bool { return f.Hash != "" }
	return s.Mode != CopyNone && (s.Made ||
		len(s.Chain) > 0 && (s.Complete || slices.ContainsFunc(s.Chain, identified)))
}
