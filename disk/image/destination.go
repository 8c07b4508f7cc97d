package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// Destination is the place where an Arrival writes: a file that has another name until it is
// complete, or a block device, which is overwritten in place.
type Destination struct {
	file   *os.File
	name   string
	what   string // the disk's name in messages; "": the disk
	device int64  // size of a block device in bytes; 0 for a regular file
	finish func(err error) error
}

// CreateDestination creates a file. Until Finish, its name is path with the suffix ".partial". If a
// file path exists, Finish replaces it if replace is set; otherwise this is an error. It is also an
// error if another process uses the file, such as a daemon that serves it. With replace, the new
// file is on storage when Finish returns: such a program may then record that the file is there, or
// take a snapshot of the volume.
func CreateDestination(path string, replace bool) (*Destination, error) {
	resolved, err := osfile.ResolvedFile(path)
	if err != nil {
		return nil, err
	}
	switch info, err := os.Lstat(resolved); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("destination %q is neither a regular file nor a block device; "+
			"name a file to create", path)
	}
	out, err := createFile(resolved, path, replace)
	if err != nil {
		return nil, err
	}
	finish := out.Finish
	if replace {
		finish = out.FinishSynced
	}
	return &Destination{file: out.File, name: path, finish: finish}, nil
}

// createFile begins the file path, which messages call name. It refuses a place where parts of
// another disk lie, such as a map: they would be taken for parts of this one.
func createFile(path, name string, replace bool) (*durable.Partial, error) {
	if part := CheckWhole(path); part != nil {
		return nil, fmt.Errorf("%q %s: name another file, or remove %s.* there first", name,
			part.Reason, filepath.Base(path))
	}
	return durable.CreateNamed(path, 0o666, replacing(replace, name))
}

// replacing returns a check for durable.CreateNamed, which calls it before it replaces a file.
func replacing(allowed bool, path string) func(*os.File) error {
	if allowed {
		return nil
	}
	return func(*os.File) error {
		return fmt.Errorf("%q exists already: name another file, or replace it with --force", path)
	}
}

// OpenDevice opens a block device exclusively. It fails if the device is in use: opened exclusively
// by another, such as a mount, locked as an image (Options.Hold), or the disk of a machine.
func OpenDevice(path string) (*Destination, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("block device %q is in use, perhaps mounted: %w", path, err)
	}
	if err != nil {
		return nil, err
	}
	// A process that reads the device as an image has locked it.
	if err := durable.HoldReplaced(f, path); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil && size == 0 {
		err = fmt.Errorf("block device %q has no size", path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	finish := func(err error) error {
		if err == nil {
			err = f.Sync()
		}
		return errors.Join(err, f.Close())
	}
	return &Destination{file: f, name: path, device: size, finish: finish}, nil
}

// NewDestination makes a destination of a new, empty file. finish closes the file, and removes it
// if its argument is an error.
func NewDestination(file *os.File, finish func(err error) error) *Destination {
	return &Destination{file: file, name: file.Name(), finish: finish}
}

// Scratch returns a destination without a name. Its content can be read from File.
func Scratch(dir string) (*Destination, error) {
	f, err := osfile.Nameless(dir)
	if err != nil {
		return nil, err
	}
	return &Destination{file: f, name: f.Name(),
		finish: func(err error) error { return errors.Join(err, f.Close()) }}, nil
}

// File is the file that Arrival writes.
func (d *Destination) File() *os.File { return d.file }

// Finish closes the destination. If err is nil, the file gets its name; otherwise the file is
// removed. A block device keeps its content.
func (d *Destination) Finish(err error) error { return d.finish(err) }

// empty removes the content of a file, unless there is none: ext4 takes a truncation to nothing as
// a sign that the file is being replaced, and writes all of it to storage when it is closed.
func (d *Destination) empty() error {
	info, err := d.file.Stat()
	if err != nil || info.Size() == 0 {
		return err
	}
	return osfile.Retry(func() error { return d.file.Truncate(0) })
}

// clear makes the destination a disk of that size that reads as zeros.
func (d *Destination) clear(ctx context.Context, size int64) error {
	if d.device == 0 {
		if err := d.empty(); err != nil {
			return d.explain(err, size)
		}
	}
	return d.extend(ctx, 0, size)
}

// extend gives the disk that size. From the byte from on, it reads as zeros.
func (d *Destination) extend(ctx context.Context, from, size int64) error {
	if d.device == 0 {
		return d.resize(size)
	}
	if size > d.device {
		return fmt.Errorf("block device %q has %s, and the disk needs %s", d.name,
			words.Bytes(d.device), words.Bytes(size))
	}
	const step = 256 << 20 // small, so that an interruption is noticed soon
	for off := from; off < size; off += step {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := d.zero(off, min(step, size-off)); err != nil {
			return fmt.Errorf("clearing block device %q: %w", d.name, err)
		}
	}
	return nil
}

// resize cuts the end of a file off, or adds zeros. The size of a device stays.
func (d *Destination) resize(size int64) error {
	if d.device != 0 {
		return nil
	}
	return d.explain(osfile.Retry(func() error { return d.file.Truncate(size) }), size)
}

// Grow makes a file at least that long, without content. The size of a block device stays.
func (d *Destination) Grow(size int64) error {
	info, err := d.file.Stat()
	if err != nil || d.device != 0 || info.Size() >= size {
		return err
	}
	return d.resize(size)
}

// zero makes a range read as zeros. It writes zeros only if the file system has no better way.
func (d *Destination) zero(off, length int64) error {
	for _, mode := range []uint32{unix.FALLOC_FL_PUNCH_HOLE, unix.FALLOC_FL_ZERO_RANGE} {
		if osfile.Call(d.file, func(fd int) error {
			return unix.Fallocate(fd, mode|unix.FALLOC_FL_KEEP_SIZE, off, length)
		}) == nil {
			return nil
		}
	}
	zeros := make([]byte, min(length, 1<<20))
	for length > 0 {
		n, err := d.file.WriteAt(zeros[:min(length, int64(len(zeros)))], off)
		if err != nil {
			return err
		}
		off, length = off+int64(n), length-int64(n)
	}
	return nil
}

// writer picks the fastest way to write. aligned says that no block of the file system is written
// twice.
func (d *Destination) writer(aligned bool) (w *rawfile.Writer, done func()) {
	if d.device != 0 {
		return rawfile.NewWriter(d.file, nil), func() {}
	}
	var past io.WriterAt
	done = func() {}
	if aligned {
		if direct, err := rawfile.OpenDirect(d.file); err == nil {
			past, done = direct, func() { direct.Close() } // the data is in the file already
		}
	}
	w = rawfile.NewWriter(d.file, past)
	w.Places = rawfile.NewPlaces(d.file, nil)
	return w, done
}

// explain makes a message for a person of an error of writing.
func (d *Destination) explain(err error, size int64) error {
	explained := NoRoom(err, filepath.Dir(d.name), cmp.Or(d.what, "the disk"), size)
	if err == nil || explained != err {
		return explained
	}
	return fmt.Errorf("writing %q: %w", d.name, err)
}
