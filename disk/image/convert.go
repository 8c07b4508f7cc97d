package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

// Convert writes the image as a sparse raw file. Until the file is complete, its name is dst with
// the suffix ".partial". If a file dst exists, it is replaced if replace is set; otherwise this is
// an error. The new file is not flushed to storage. If dst is a block device, it is overwritten and
// flushed. If the image changes meanwhile, this is an error. p may be nil.
func Convert(ctx context.Context, img *Image, dst string, replace bool, p *Progress) error {
	p = cmp.Or(p, new(Progress))
	if info, err := os.Stat(dst); err == nil && info.Mode().Type() == fs.ModeDevice {
		return overwrite(ctx, img, dst, p)
	}
	err := convert(img, dst, replace, func(f *os.File) error {
		if err := CheckSpace(ctx, img, filepath.Dir(f.Name()), 0); err != nil {
			return err
		}
		to := NewDestination(f, nil)
		to.what = "the expanded disk of " + words.Name(img.Name())
		return Expand(ctx, img, to, p)
	})
	if err == nil {
		p.Finish()
	}
	return err
}

// overwrite writes the image to a block device.
func overwrite(ctx context.Context, img *Image, device string, p *Progress) error {
	var st unix.Stat_t
	if err := osfile.Retry(func() error { return unix.Stat(device, &st) }); err != nil {
		return &os.PathError{Op: "stat", Path: device, Err: err}
	}
	if f, ok := img.top.bytes.(*fileSource); ok && isDevice(&f.stat) && f.stat.Rdev == st.Rdev {
		return fmt.Errorf("destination %q is the image itself; name another device", device)
	}
	to, err := OpenDevice(device)
	if err != nil {
		return err
	}
	if err = to.Finish(Expand(ctx, img, to, p)); err == nil {
		p.Finish()
	}
	return err
}

// Expand writes the image to a destination, as a raw disk. If the image changes meanwhile, this is
// an error. p may be nil.
func Expand(ctx context.Context, img *Image, to *Destination, p *Progress) error {
	_, err := newCopier(img, to, p, 0).run(ctx)
	if err == nil { // if a raw file has become shorter, its end was read as a hole
		err = img.CheckUntouched()
	}
	if err == nil && to.device == 0 {
		err = rememberCopy(to.file)
	}
	return err
}

// convert calls write with a file that gets the name dst once it is complete.
func convert(img *Image, dst string, replace bool, write func(*os.File) error) error {
	// The user named the path of the directory, so the path may contain links. No link is followed
	// inside the directory.
	dst, err := osfile.ResolvedFile(dst)
	if err != nil {
		return err
	}
	if err := checkDestination(img, dst); err != nil {
		return err
	}
	if err := checkDestination(img, dst+durable.PartialSuffix); err != nil {
		return fmt.Errorf("%q is written under another name until it is complete: %w", dst, err)
	}
	out, err := createFile(dst, dst, replace)
	if err != nil {
		return err
	}
	return out.Finish(write(out.File))
}

// checkDestination refuses to overwrite the image's own files, and anything that is not a regular
// file.
func checkDestination(img *Image, dst string) error {
	var st unix.Stat_t
	err := osfile.Retry(func() error { return unix.Lstat(dst, &st) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "lstat", Path: dst, Err: err}
	}
	if err := checkRegular(&st); err != nil {
		return fmt.Errorf("destination %q %w; name a file to create", dst, err)
	}
	img.top.chain(func(l *layer) {
		if l.id() == (fileID{dev: uint64(st.Dev), ino: st.Ino}) {
			err = fmt.Errorf("destination %q is the image %q itself or one of its backing files; "+
				"name another file", dst, img.Name())
		}
	})
	return err
}

// CopyUnit is the size of the image's largest compressed clusters in bytes, or 0 if it has none.
// Such clusters are best copied whole.
func (m *Image) CopyUnit() int64 {
	unit := int64(0)
	m.top.chain(func(l *layer) {
		if l.header.compression != "" {
			unit = max(unit, l.header.clusterSize)
		}
	})
	return unit
}
