package instance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
)

// inPlace serves the raw file of the image itself. The disk's identity is in the work directory.
func (o *opening) inPlace(context.Context) (*Instance, error) {
	file, readOnly, err := o.openImageFile()
	if err != nil {
		return nil, err
	}
	o.file = file
	disk, err := rawfile.FromOpen(file, rawfile.Options{ReadOnly: readOnly, Durable: true,
		Guest: true, Killed: o.dir.killed})
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	s, err := loadState(o.dir.state())
	if durable.IsUnread(err) {
		return nil, errors.Join(o.unread(err), disk.Close())
	}
	kept := err == nil && s.Mode == CopyNone && s.Image == storedName(o.name)
	if !kept || !o.sameFile(s, file, readOnly) || o.otherBlocks(s) != "" {
		if err := o.checkBlocks(file, disk.Size()); err != nil {
			return nil, errors.Join(err, disk.Close())
		}
	}
	if !kept {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			o.log.Warn("the disk gets a new identity", zap.String("reason", stateReason(err)))
		}
		if _, err := os.Lstat(o.dir.disk()); err == nil && o.opt.Leftovers != LeftoversKeep {
			o.log.Warn("removing the disk of an earlier start: the image is served in place now",
				zap.String("disk", o.dir.disk()))
		}
		if err := o.makeWay("the image is served in place now"); err != nil {
			return nil, errors.Join(err, disk.Close())
		}
		s = o.newState(disk.Size())
		s.Durable = true
	}
	if kept, err = o.refreshState(s, kept, file, readOnly); err != nil {
		return nil, errors.Join(err, disk.Close())
	}
	o.opt.Progress.Start(disk.Size(), 0)
	o.opt.Progress.Finish()
	o.log.Info("serving the image file in place", zap.String("disk", o.img.Path()),
		zap.Bool("read_only", readOnly), zap.String("serial", s.Identity.Serial))
	return &Instance{Disk: disk, Identity: s.Identity, BlockSize: s.blockSize(), path: o.img.Path(),
		ReadOnly: readOnly, kept: kept, content: s.Map, durable: true}, nil
}

// refreshState updates the state of an earlier start, and reports whether the file is the same. An
// image in a container's own layer, for example, is another file after a restart, with its original
// content. It must not get the unit's data about the old content: reservations, and the former
// content of interrupted writes. A read-only start cannot tell: a container may replace the file by
// a copy when it is opened for writing.
func (o *opening) refreshState(s *state, kept bool, file *os.File, readOnly bool) (
	same bool, err error) {
	id, which := o.identity(s.Identity), s.File
	if !readOnly {
		which = image.FileInstance(file)
	}
	same = kept && o.sameFile(s, file, readOnly)
	if o.opt.BlockSize != 0 {
		same = same && o.opt.BlockSize == s.blockSize()
		s.BlockSize = o.newBlockSize()
	}
	if same && id == s.Identity && s.Owner == o.owner() && which == s.File && s.LUN == o.lun(s) {
		return true, nil
	}
	s.Identity, s.Owner, s.File, s.LUN = id, o.owner(), which, o.lun(s)
	if same || !kept {
		return same, o.spaceError(o.dir.saveState(s, true))
	}
	o.log.Warn("the image file has changed since the earlier start: its stored state, such as " +
		"reservations, is dropped")
	s.Map, s.Created = newMapID(), time.Now().UTC()
	if err := o.spaceError(o.dir.saveState(s, true)); err != nil {
		return false, err
	}
	return false, o.dir.clearUnits()
}

// sameFile reports whether the file is the one of an earlier start, as far as can be told.
func (o *opening) sameFile(s *state, file *os.File, readOnly bool) bool {
	if s.File == "" || readOnly {
		return true
	}
	which := image.FileInstance(file)
	return which == "" || which == s.File
}

// lockFile locks the file of a disk. Two processes that write to one file destroy it, and a process
// that reads the file as an image meanwhile gets a mixture. On a file system without locks, the
// file can only be read.
func lockFile(file *os.File, readOnly bool) (err error) {
	taken := false
	if readOnly {
		taken = flock.Taken(file, unix.LOCK_SH)
	} else if err = flock.LockSoon(file, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		taken = true
	}
	if taken {
		return &durable.LockedError{Path: file.Name(),
			Holder: "another process, or by another disk of this one"}
	}
	return err
}

// stillNamed checks that an open and locked file still has the image's name: convert and pull may
// have had the lock before, to replace the file. It compares two openings, because stat(2) of a
// name in an overlay file system may tell another inode than that of the opened file.
func (o *opening) stillNamed(file *os.File) error {
	again, err := o.img.OpenRaw(false)
	if err != nil {
		return err
	}
	defer again.Close()
	mine, err := file.Stat()
	if err != nil {
		return err
	}
	now, err := again.Stat()
	if err == nil && !os.SameFile(mine, now) {
		err = fmt.Errorf("image %q was replaced while it was opened; start again", o.img.Path())
	}
	return err
}

// openImageFile opens the image's own file for writing and locks it. A file that cannot be written
// is opened read-only.
func (o *opening) openImageFile() (file *os.File, readOnly bool, err error) {
	readOnly = o.opt.ReadOnly
	file, err = o.img.OpenRaw(!readOnly)
	if !readOnly && (errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) ||
		errors.Is(err, unix.EPERM)) {
		o.log.Warn("the image file cannot be written, so the disk is read-only", zap.Error(err))
		readOnly = true
		file, err = o.img.OpenRaw(false)
	}
	if err != nil {
		return nil, false, err
	}
	err = lockFile(file, readOnly)
	if err == nil && !readOnly && flock.InMachine(file) {
		err = &durable.LockedError{Path: file.Name(), Holder: "a virtual machine (QEMU)"}
	}
	if err == nil {
		err = o.stillNamed(file)
	}
	if err != nil {
		return nil, false, errors.Join(err, file.Close())
	}
	if readOnly {
		return file, true, nil
	}
	// If this fails, serve the disk anyway. If the guest writes a header, the next start may not
	// recognise the disk, but it does not follow the header to another file.
	if err := o.img.RememberRaw(file); err != nil {
		o.log.Warn("cannot remember with the file that the disk is raw: say so by \"format: "+
			"raw\" for it under \"disks\" in the configuration file, or a later start goes by "+
			"what a guest has written", zap.String("disk", file.Name()), zap.Error(err))
	}
	return file, false, nil
}
