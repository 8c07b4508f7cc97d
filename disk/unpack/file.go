package unpack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// File is a wrapped file of this machine. It is opened once, so its path may lead elsewhere later.
// It is locked (flock, shared) until Close, so that it is not replaced while it is read.
type File struct {
	Path   string
	Name   string // of the disk: see Content
	Packed int64  // bytes of the file
	opt    Options
	size   int64 // of the disk's file, bytes; -1: unknown
	in     *os.File
	info   fs.FileInfo // when it was opened
}

// Find looks for the disk in a file that was refused as an image. why is the refusal; Find returns
// it if the file is not wrapped. The caller calls Close.
func Find(path string, why error, opt Options) (*File, error) {
	refused := new(image.Error)
	if !errors.As(why, &refused) || !image.IsWrapping(refused.Format) && refused.Format != VMDK {
		return nil, why
	}
	f := &File{Path: path, opt: opt}
	if err := f.open(why); err != nil {
		return nil, err
	}
	return f, nil
}

func (f *File) open(why error) (err error) {
	if f.in, err = osfile.OpenRegular(f.Path); err != nil {
		return err
	}
	if f.info, err = f.in.Stat(); err == nil {
		err = durable.HoldFile(f.in, f.Path, unix.LOCK_SH)
	}
	if err == nil {
		f.Packed = f.info.Size()
		err = f.read(func(int) {}, func(c *Content) error {
			if len(c.Formats) == 0 {
				return why
			}
			f.Name, f.size = c.Name, c.Size
			return nil
		})
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	return nil
}

// Close closes the file.
func (f *File) Close() error { return f.in.Close() }

// Is reports whether another path leads to the file.
func (f *File) Is(path string) bool {
	there, err := os.Stat(path)
	return err == nil && os.SameFile(there, f.info)
}

// read unwraps the file.
func (f *File) read(count func(n int), use func(c *Content) error) error {
	in := io.NewSectionReader(f.in, 0, f.Packed)
	c, err := Open(f.Path, counter{in, count}, f.Packed, f.opt)
	if err == nil {
		err = errors.Join(use(c), c.Close())
	}
	if now, statErr := f.in.Stat(); err == nil && (statErr != nil || now.Size() != f.Packed ||
		!now.ModTime().Equal(f.info.ModTime())) {
		err = errors.Join(statErr, refuse("was changed while it was read; start again when "+
			"nothing writes to it"))
	}
	if errors.As(err, new(*Error)) {
		err = fmt.Errorf("%q %w", filepath.Base(f.Path), err)
	}
	return err
}

// Write writes the disk to a new destination. It calls count with the number of bytes that were
// read. The caller finishes the destination.
func (f *File) Write(ctx context.Context, to *image.Destination, opt image.ArrivalOptions,
	count func(n int)) (*image.Arrival, error) {
	a := image.NewArrival(f.Name, f.size, to, opt)
	for !a.Done() {
		if err := f.read(count, func(c *Content) error {
			in := Within(ctx, c)
			if err := a.Pass(ctx, in); err != nil {
				return err
			}
			_, err := io.Copy(io.Discard, in) // to check what follows the disk, too
			return err
		}); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// Scratch writes the disk's file as it is, raw or qcow2, to a file without a name in os.TempDir. If
// it is a raw disk, it returns a name of a raw disk.
func (f *File) Scratch(ctx context.Context, opt image.Options, count func(n int)) (*os.File,
	error) {
	to, err := image.Scratch(os.TempDir())
	if err != nil {
		return nil, err
	}
	a, err := f.Write(ctx, to, image.ArrivalOptions{Options: opt, Original: true}, count)
	if err != nil {
		return nil, errors.Join(image.InTempDir(err), to.Finish(nil))
	}
	if a.Format() == image.FormatRaw && !image.HasRawExtension(f.Name) {
		f.Name += ".raw"
	}
	return to.File(), nil
}

// counter tells how much was read.
type counter struct {
	io.Reader
	count func(n int)
}

func (c counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.count(n)
	return n, err
}

// Within makes reads end with the context: a few packed bytes may be terabytes of zeros.
func Within(ctx context.Context, r io.Reader) io.Reader { return within{ctx, r} }

type within struct {
	ctx context.Context
	io.Reader
}

func (w within) Read(p []byte) (int, error) {
	if err := w.ctx.Err(); err != nil {
		return 0, err
	}
	return w.Reader.Read(p)
}
