package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
)

// writable notices a destination that cannot be written early, before any request.
func writable(dest string, replace bool) error {
	if dest == "-" {
		return nil
	}
	dir := filepath.Dir(dest)
	switch info, err := os.Stat(dest); {
	case err == nil && info.IsDir():
		dir = dest
	case err == nil && info.Mode()&fs.ModeDevice != 0:
		f, err := os.OpenFile(dest, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("block device %q cannot be written: %w", dest, errors.Unwrap(err))
		}
		return f.Close()
	case err == nil && info.Mode().IsRegular() && !replace:
		return fmt.Errorf("%q exists already: name another file, or replace it with --force", dest)
	}
	if info, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no directory %q: make it first", dir)
	} else if err == nil && !info.IsDir() {
		return fmt.Errorf("%q is not a directory", dir)
	}
	f, err := osfile.Nameless(dir)
	if err != nil {
		return fmt.Errorf("nothing can be written to the directory %q by user %d: %w", dir,
			os.Geteuid(), errors.Unwrap(err))
	}
	return f.Close()
}

// stdout writes a disk in the order of its bytes. A raw file is written directly. An image has
// another order. It is first expanded into a file without a name in the directory for temporary
// files.
func (p *puller) stdout(ctx context.Context, f *file) ([]Pulled, error) {
	done := Pulled{Name: f.name, To: "-", Format: image.FormatRaw, Size: f.size}
	direct := p.opt.Original
	err := p.rereadLayer(ctx, f, func(content io.Reader) error {
		if err := p.peek(f, &content); err != nil {
			return err
		}
		if f.isQcow2 {
			done.Format = image.FormatQcow2
		}
		if direct = direct || !f.isQcow2 && !f.foreign; !direct {
			return nil
		}
		n, err := io.Copy(p.opt.Stdout, content)
		if done.Size = n; err == nil && f.contentSize() >= 0 && n != f.size {
			err = io.ErrUnexpectedEOF
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("standard output has only a part of the disk: %w", err)
	}
	if direct {
		return []Pulled{done}, nil
	}
	if f.to, err = image.Scratch(os.TempDir()); err != nil {
		return nil, err
	}
	f.arrival = image.NewArrival(f.diskName(), f.contentSize(), f.to,
		image.ArrivalOptions{Options: p.opt.Image})
	if err := p.arrive(ctx, f, 0); err != nil {
		return nil, err
	}
	done.Size, done.Format = f.arrival.VirtualSize(), f.arrival.Format()
	if _, err := io.Copy(p.opt.Stdout, io.NewSectionReader(f.to.File(), 0, done.Size)); err != nil {
		return nil, fmt.Errorf("standard output has only a part of the disk: %w", err)
	}
	return []Pulled{done}, nil
}
