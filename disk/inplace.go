package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// inPlace serves a raw file itself. Its identity is kept in the work directory.
func (o *opening) inPlace(context.Context) (*Instance, error) {
	file, readOnly, err := o.openImageFile()
	if err != nil {
		return nil, err
	}
	disk, err := newFile(file, FileOptions{ReadOnly: readOnly, Durable: true})
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	s, err := loadState(o.dir.state())
	kept := err == nil && s.Mode == CopyNone && s.Image == o.img.Name()
	if !kept {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			o.log.Warn("the disk gets a new identity", zap.String("reason", stateReason(err)))
		}
		if _, err := os.Lstat(o.dir.disk()); err == nil {
			o.log.Warn("removing the disk of an earlier start: the image is served in place now", zap.String("disk", o.dir.disk()))
		}
		err = o.dir.clear()
		s = &state{Version: stateVersion, Image: o.img.Name(), Owner: o.owner(), Mode: CopyNone, Size: disk.Size(), Identity: newIdentity(),
			Created: time.Now().UTC(), Durable: true, Map: newMapID()}
		if err == nil {
			err = o.spaceError(s.save(o.dir.state(), true))
		}
		if err != nil {
			return nil, errors.Join(err, disk.Close())
		}
	}
	if id := o.identity(s.Identity); id != s.Identity || s.Owner != o.owner() {
		s.Identity, s.Owner = id, o.owner()
		if err := o.spaceError(s.save(o.dir.state(), true)); err != nil {
			return nil, errors.Join(err, disk.Close())
		}
	}
	o.opt.Progress.start(disk.Size(), 0)
	o.opt.Progress.finish()
	o.log.Info("serving the image file in place", zap.String("disk", o.img.Path()), zap.Bool("read_only", readOnly),
		zap.String("serial", s.Identity.Serial))
	return &Instance{Disk: disk, Identity: s.Identity, Path: o.img.Path(), ReadOnly: readOnly, Kept: kept, Created: s.Created, content: s.Map}, nil
}

// openImageFile opens the image's own file for writing, and locks it: two daemons that write to one file destroy it.
// Where it cannot be written it is opened read-only.
func (o *opening) openImageFile() (file *os.File, readOnly bool, err error) {
	dir, err := openDirectory(o.img.dir)
	if err != nil {
		return nil, false, err
	}
	defer dir.close()
	readOnly = o.opt.ReadOnly
	access := unix.O_RDWR
	if readOnly {
		access = unix.O_RDONLY
	}
	file, st, err := dir.openAs(o.img.Name(), access)
	if !readOnly && (errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)) {
		o.log.Warn("the image file cannot be written, so the disk is read-only", zap.Error(err))
		readOnly = true
		file, st, err = dir.openAs(o.img.Name(), unix.O_RDONLY)
	}
	if err != nil {
		reason, _ := explainOpen(err)
		return nil, false, fmt.Errorf("image %s %s: %w", o.img.Path(), reason, err)
	}
	// Not compared by inode: an overlay file system may give the file another one when it is opened for writing.
	if err := o.stillRaw(file, st); err != nil {
		return nil, false, errors.Join(err, file.Close())
	}
	if !readOnly {
		if err := lockFile(file); errors.Is(err, unix.EWOULDBLOCK) {
			return nil, false, errors.Join(&LockedError{Path: "image " + o.img.Path(), Holder: "another process"}, file.Close())
		} else if err != nil {
			return nil, false, errors.Join(&os.PathError{Op: "flock", Path: o.img.Path(), Err: err}, file.Close())
		}
	}
	return file, readOnly, nil
}

// stillRaw checks what was validated once more, as the file was opened a second time.
func (o *opening) stillRaw(file *os.File, st *unix.Stat_t) error {
	head, tail, err := readEnds(file, st.Size)
	if err != nil {
		return fmt.Errorf("image %s: %w", o.img.Path(), err)
	}
	if detect(head, tail) != nil || st.Size != o.img.Size() {
		return fmt.Errorf("image %s was exchanged after it was validated; start again", o.img.Path())
	}
	return nil
}
