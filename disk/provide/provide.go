package provide

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// Options are the options for making a file from an image.
type Options struct {
	// To is the path of the file without its extension. The extension is .qcow2 for a qcow2 image
	// without backing files, and otherwise .raw. The directory is made if it is missing.
	To string
	// ReadOnly: the file is never written. Then the file may be a hard link to the image's.
	ReadOnly bool
	Log      *zap.Logger     // nil: none
	Progress *image.Progress // nil: unused
}

// qemuID is the user and the group of QEMU in KubeVirt's launcher.
const qemuID = 107

// File is a file that was provided.
type File struct {
	Path   string
	Format image.Format
	How    string // "reflink", "hard link", "copy", "conversion", or "kept" from an earlier run

	file  *os.File // kept open, so that the file's inode is not used again
	lock  *os.File
	state string // path
}

// providing is one call of Provide.
type providing struct {
	img  *image.Image
	opt  Options
	dir  string // with links resolved
	path string // of the file
	base string // of the file, without the extension
	file *File
}

// Provide makes a file of an image that QEMU can use, and returns when the file is complete. A file
// that an earlier run made of the same image is kept, with the data that a guest has written. The
// caller closes the image.
//
// Errors: *image.SpaceError if the file does not fit; nothing is left then. *durable.LockedError,
// with a message of its own, if another process provides this file.
func Provide(ctx context.Context, img *image.Image, opt Options) (*File, error) {
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	opt.Progress = cmp.Or(opt.Progress, new(image.Progress))
	p := &providing{img: img, opt: opt, base: filepath.Base(opt.To)}
	format := img.Format()
	if len(img.Info().BackingChain) > 0 {
		format = image.FormatRaw // QEMU would not find the backing files
	}
	if err := p.findDirectory(); err != nil {
		return nil, err
	}
	p.path = filepath.Join(p.dir, p.base+"."+string(format))
	p.file = &File{Path: p.path, Format: format, state: p.hidden(".provided")}
	lock, err := acquireLock(p.hidden(".lock"), p.path)
	if err != nil {
		return nil, err
	}
	p.file.lock = lock
	if err := p.keepOrMake(ctx); err != nil {
		return nil, errors.Join(err, p.forget(), p.file.release())
	}
	if err := p.claim(); err != nil {
		return nil, errors.Join(err, p.file.release())
	}
	return p.file, nil
}

// claim locks the file itself for as long as it is provided. So while a machine writes to it, no
// program takes it for an image, serves it in place or replaces it.
func (p *providing) claim() error {
	how := unix.LOCK_EX
	if p.opt.ReadOnly {
		how = unix.LOCK_SH // the file may be the image's own
	}
	return durable.HoldFile(p.file.file, p.path, how)
}

// hidden is the path of another file of this package, next to the provided one.
func (p *providing) hidden(suffix string) string {
	return filepath.Join(p.dir, "."+p.base+suffix)
}

// findDirectory makes the directory of the file, as callers of the original wrapper expect.
func (p *providing) findDirectory() error {
	if p.opt.To == "" || p.base == "." || p.base == ".." || p.base == string(filepath.Separator) {
		return fmt.Errorf("%q is not the path of a file", p.opt.To)
	}
	dir := filepath.Dir(p.opt.To)
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		p.dir, err = osfile.Resolved(dir)
	}
	if err != nil {
		return fmt.Errorf("the directory of %q cannot be used by user %d: %w; mount a volume "+
			"there that this user can write to", p.opt.To, os.Geteuid(), err)
	}
	of, err := osfile.Resolved(filepath.Dir(p.img.Path()))
	if err == nil && of == p.dir {
		return fmt.Errorf("%q is in the directory of the image, where the file would be taken for "+
			"another image: name another directory", p.opt.To)
	}
	return err
}

// acquireLock locks the file at path. A run that ends removes the file, so several attempts may be
// needed.
func acquireLock(path, what string) (lock *os.File, err error) {
	for range 16 {
		lock, err = durable.AcquireLock(path, what)
		if !errors.Is(err, durable.ErrLockGone) {
			break
		}
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("%w; user %d must be able to write in that directory", err,
			os.Geteuid())
	}
	return lock, err
}

// keepOrMake finds the file of an earlier run, or makes one.
func (p *providing) keepOrMake(ctx context.Context) error {
	now, err := p.describe()
	if err != nil {
		return err
	}
	known, err := loadRecord(p.file.state)
	if err != nil {
		return err
	}
	if known != nil {
		kept, err := p.keep(known, now)
		if kept || err != nil {
			return err
		}
	}
	if _, err := os.Lstat(p.path); !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = p.foreign()
		}
		return err
	}
	begin := time.Now()
	if err := p.makeFile(ctx, now); err != nil {
		return err
	}
	p.opt.Progress.Finish()
	p.opt.Log.Info("the disk is ready", zap.String("path", p.path),
		zap.String("image", p.img.Name()), zap.String("how", p.file.How),
		zap.Int64("size", p.img.Size()), zap.Duration("duration", time.Since(begin)))
	return nil
}

// foreign is the error for an existing file at the path that no earlier run made.
func (p *providing) foreign() error {
	return fmt.Errorf("%q exists already, and this program has not made it: remove it, or choose "+
		"another path", p.path)
}

// keep opens the file of an earlier run, which was killed. It reports whether the file is there.
func (p *providing) keep(known *record, now record) (bool, error) {
	path := filepath.Join(p.dir, known.File)
	f, err := durable.OpenToLock(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if instanceOf(f) != known.Instance {
		return false, f.Close() // the file was replaced
	}
	if known.Image != now.Image || path != p.path {
		return false, errors.Join(fmt.Errorf("%q was made of another image by a run that was "+
			"killed, and a machine may be using it: stop the machine, and remove the file", path),
			f.Close())
	}
	if known.ReadOnly && !now.ReadOnly {
		return false, errors.Join(fmt.Errorf("%q was made to be read only, by a run that was "+
			"killed: say so again, or stop the machine, and remove the file", path), f.Close())
	}
	p.file.file, p.file.How = f, "kept"
	p.opt.Log.Info("the disk of an earlier run is kept, with what was written to it",
		zap.String("path", p.path), zap.String("image", p.img.Name()))
	return true, nil
}

// forget removes what a failed run has made, unless a file of an earlier run needs it.
func (p *providing) forget() error {
	known, err := loadRecord(p.file.state)
	if err != nil || known == nil {
		return nil
	}
	f, err := osfile.OpenFile(filepath.Join(p.dir, known.File), os.O_RDONLY, 0)
	switch {
	case err == nil:
		defer f.Close()
		if instanceOf(f) == known.Instance {
			return nil
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil // the file may be there, although it cannot be opened now
	}
	return osfile.Remove(p.file.state)
}

// Gone reports whether the file has lost its name, because it was removed or replaced.
func (f *File) Gone() (bool, error) {
	there, err := flock.HasName(f.file, f.Path)
	return err == nil && !there, err
}

// Remove removes the file and the files next to it, unless the file was replaced.
func (f *File) Remove() error {
	gone, err := f.Gone()
	if err == nil && !gone {
		err = osfile.Remove(f.Path)
	}
	if err == nil {
		err = osfile.Remove(f.state)
	}
	if err == nil {
		err = durable.SyncParent(f.Path)
	}
	return errors.Join(err, f.release())
}

// release lets other runs use the file. The file stays where it is.
func (f *File) release() (err error) {
	if f.lock != nil {
		name := f.lock.Name()
		err = errors.Join(osfile.Remove(name), durable.ReleaseLock(f.lock))
		f.lock = nil
	}
	if f.file != nil {
		err = errors.Join(err, f.file.Close())
		f.file = nil
	}
	return err
}

// spaceError explains an error of writing.
func (p *providing) spaceError(err error) error {
	return image.NoRoom(err, p.dir, "the file of "+words.Name(p.img.Name()), 0)
}
