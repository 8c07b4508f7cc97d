package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// partialSuffix marks a file that is still being written.
const partialSuffix = ".partial"

// Convert writes the image as a sparse raw file. The file appears under its name, in place of one that was there, only
// when it is complete; until then it is dst with the suffix ".partial". It is not flushed to storage. An image that is changed
// meanwhile is an error. p may be nil.
func Convert(ctx context.Context, img *Image, dst string, p *Progress) error {
	if err := checkDestination(img, dst); err != nil {
		return err
	}
	if err := checkDestination(img, dst+partialSuffix); err != nil {
		return fmt.Errorf("%s is written under another name until it is complete: %w", dst, err)
	}
	if err := checkSpace(ctx, img, filepath.Dir(dst), 0); err != nil {
		return err
	}
	if p == nil {
		p = new(Progress)
	}
	out, err := createPartial(dst, 0o666)
	if err != nil {
		return err
	}
	_, err = newCopier(img, out.file, p, 0).run(ctx)
	if err == nil {
		err = img.checkUntouched() // the end of a raw file that became shorter has been read as a hole
	}
	if err = out.finish(err); err != nil {
		return err
	}
	p.finish()
	return nil
}

// checkDestination refuses what would be emptied or replaced: the image's own files, and anything that is no regular file.
func checkDestination(img *Image, dst string) error {
	var st unix.Stat_t
	err := retry(func() error { return unix.Lstat(dst, &st) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "lstat", Path: dst, Err: err}
	}
	if err := checkRegular(&st); err != nil {
		return fmt.Errorf("destination %s %w; name a file to create", dst, err)
	}
	img.top.chain(func(l *layer) {
		if l.id() == (fileID{uint64(st.Dev), st.Ino}) {
			err = fmt.Errorf("destination %s is the image %s itself or one of its backing files; name another file", dst, img.Name())
		}
	})
	return err
}

// partial is a file on its way to its final name.
type partial struct {
	file *os.File
	path string // the final one
}

// createPartial begins a file that is to be path. One that a killed process left behind is taken over and emptied; one
// that is being written at the moment is a *LockedError.
func createPartial(path string, mode fs.FileMode) (*partial, error) {
	name := path + partialSuffix
	for range 16 {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, mode)
		if err != nil {
			return nil, err
		}
		current, err := claimPartial(f, name)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if current {
			return &partial{file: f, path: path}, nil
		}
		f.Close() // the other process finished it in between, so this is its result by now
	}
	return nil, &LockedError{Path: name, Holder: "another process"}
}

// claimPartial locks and empties a partial file, unless it no longer has that name.
func claimPartial(f *os.File, name string) (current bool, err error) {
	if err := lockFile(f); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, &LockedError{Path: name, Holder: "another process that writes it"}
		}
		return false, &os.PathError{Op: "flock", Path: name, Err: err}
	}
	if current, err := hasName(f, name); err != nil || !current {
		return false, err
	}
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !mine.Mode().IsRegular() {
		return false, fmt.Errorf("%s is in the way and no regular file; remove it", name)
	}
	if mine.Size() == 0 {
		// ext4 takes a file that was truncated for one that is being replaced, and starts to write it out when it is closed.
		return true, nil
	}
	return true, f.Truncate(0)
}

// finish gives the file its final name if what was done so far succeeded; otherwise it removes the file.
func (p *partial) finish(err error) error {
	name := p.path + partialSuffix
	if err == nil {
		if err = os.Rename(name, p.path); err == nil {
			return p.file.Close()
		}
	}
	return errors.Join(err, os.Remove(name), p.file.Close())
}

// copyUnit is what is copied of the image at once: the largest cluster that is compressed as a whole. Bytes.
func (m *Image) copyUnit() int64 {
	unit := int64(0)
	m.top.chain(func(l *layer) {
		if l.header.compression != "" {
			unit = max(unit, l.header.clusterSize)
		}
	})
	return unit
}
