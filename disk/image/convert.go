package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/osfile"
	"kubevirt.io/disk/disk/internal/smallfile"
)

// Convert writes the image as a sparse raw file. The file appears under its name, in place of one
// that was there, only when it is complete; until then it is dst with the suffix ".partial". It is
// not flushed to storage. An image that is changed meanwhile is an error. p may be nil.
func Convert(ctx context.Context, img *Image, dst string, p *Progress) error {
	if p == nil {
		p = new(Progress)
	}
	err := convert(img, dst, func(f *os.File) error {
		if err := CheckSpace(ctx, img, filepath.Dir(f.Name()), 0); err != nil {
			return err
		}
		if _, err := newCopier(img, f, p, 0).run(ctx); err != nil {
			return err
		}
		// The end of a raw file that became shorter has been read as a hole.
		if err := img.CheckUntouched(); err != nil {
			return err
		}
		return rememberCopy(f)
	})
	if err == nil {
		p.Finish()
	}
	return err
}

// convert lets a file be written that is not called dst until it is complete.
func convert(img *Image, dst string, write func(*os.File) error) error {
	// What the user has named may lead through links; beside the file, nothing that was put there
	// does.
	dir, err := osfile.Resolved(filepath.Dir(dst))
	if err != nil {
		return err
	}
	dst = filepath.Join(dir, filepath.Base(dst))
	if err := checkDestination(img, dst); err != nil {
		return err
	}
	if err := checkDestination(img, dst+smallfile.PartialSuffix); err != nil {
		return fmt.Errorf("%q is written under another name until it is complete: %w", dst, err)
	}
	out, err := smallfile.Create(dst, 0o666)
	if err != nil {
		return err
	}
	return out.Finish(write(out.File))
}

// checkDestination refuses what would be emptied or replaced: the image's own files, and anything
// that is no regular file.
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

// CopyUnit is what is copied of the image at once: the largest cluster that is compressed as a
// whole. Bytes.
func (m *Image) CopyUnit() int64 {
	unit := int64(0)
	m.top.chain(func(l *layer) {
		if l.header.compression != "" {
			unit = max(unit, l.header.clusterSize)
		}
	})
	return unit
}
