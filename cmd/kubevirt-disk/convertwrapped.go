package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/internal/cli/console"
)

// foreign are the options for what is converted, or fetched.
var foreign = image.Options{Foreign: true}

// openWrapped converts the disk in a wrapped file. If that can be done as the file is read, it
// returns no image. Otherwise the disk lies in a temporary file first: a qcow2 image is made of
// places of the disk in any order, and standard output gets it in the one of the disk. why says
// that the file is no image.
func (a *app) openWrapped(ctx context.Context, source, destination string, o convertOptions,
	why error) (*image.Image, error) {
	f, err := unpack.Find(source, why, unpack.Options{Memory: o.unpack})
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(a.stderr, "%s: unpacking %s\n", console.OneLine(source), console.OneLine(f.Name))
	p := &unpacking{file: f}
	report := a.reporter(console.OneLine(f.Name))
	if o.target(destination) == image.FormatRaw && destination != standardStream {
		err := report.While(p, func() error { return p.expand(ctx, destination, o.force) })
		if err != nil && ctx.Err() != nil {
			return nil, fmt.Errorf("interrupted: %q was not written", destination)
		}
		return nil, explainWrite(err, destination)
	}
	var file *os.File
	err = report.While(p, func() (err error) {
		file, err = f.Scratch(ctx, foreign, p.count)
		return err
	})
	if err != nil {
		return nil, err
	}
	img, err := image.OpenUnnamed(ctx, f.Name, file, foreign)
	return img, errors.Join(err, file.Close())
}

// unpacking is the progress of a wrapped file.
type unpacking struct {
	file *unpack.File
	came atomic.Int64 // bytes of the file
	size atomic.Int64 // of the disk, bytes; 0: it is not complete
}

func (u *unpacking) count(n int) { u.came.Add(int64(n)) }

func (u *unpacking) Done() int64 { return min(u.came.Load(), u.file.Packed) }

func (u *unpacking) Total() int64 {
	if size := u.size.Load(); size > 0 {
		return size
	}
	return u.file.Packed
}

func (u *unpacking) Data() (done, total int64) { return u.Done(), u.file.Packed }

// expand writes the disk as a raw one, while its file is read.
func (u *unpacking) expand(ctx context.Context, destination string, replace bool) error {
	open := func() (*image.Destination, error) {
		return image.CreateDestination(destination, replace)
	}
	if info, err := os.Stat(destination); err == nil && info.Mode().Type() == fs.ModeDevice {
		open = func() (*image.Destination, error) { return image.OpenDevice(destination) }
	}
	to, err := open()
	if err != nil {
		return err
	}
	a, err := u.file.Write(ctx, to, image.ArrivalOptions{Options: foreign}, u.count)
	if err = to.Finish(err); err == nil {
		u.size.Store(a.VirtualSize())
	}
	return err
}
