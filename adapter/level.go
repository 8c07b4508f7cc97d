package adapter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/qcow2"
)

// write makes a level. make writes what the level changes, and returns the size of the disk.
func (b *builder) write(l *Level, below string, make func(dst io.WriterAt) (int64, error)) (
	err error,
) {
	f, err := b.claim(l)
	if err != nil {
		return err
	}
	if f == nil { // somebody else has just made it
		_, err = make(nil)
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	name := f.Name()
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(name))
		}
	}()
	out, err := qcow2.NewAppender(f, qcow2.AppendOptions{Backing: below})
	if err != nil {
		return err
	}
	size, err := make(out)
	if err != nil {
		return err
	}
	if l.Bytes, err = out.Finish(size); err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(name, filepath.Join(b.dir, l.File)); err != nil {
		return err
	}
	return syncDir(b.dir)
}

// partialSuffix ends the names of files that are not complete.
const partialSuffix = ".partial"

// claim opens the file under whose name a level is made, locked and empty. A daemon that was killed
// leaves it behind, and the next one takes it over. Whoever wants the same level waits, and gets
// nil when it is there.
func (b *builder) claim(l *Level) (*os.File, error) {
	name := filepath.Join(b.dir, "."+l.File+partialSuffix)
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
		if err != nil {
			return nil, err
		}
		current, err := lock(f, name)
		if err != nil || !current {
			if err := errors.Join(err, f.Close()); err != nil {
				return nil, err
			}
			continue
		}
		there, err := b.find(l)
		if there || err != nil {
			return nil, errors.Join(err, os.Remove(name), f.Close())
		}
		if err := f.Truncate(0); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return f, nil
	}
}

// lock waits until the file is locked, and tells whether it still has its name.
func lock(f *os.File, name string) (current bool, err error) {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return false, fmt.Errorf("locking %q: %w", name, err)
		}
	}
	held, err := f.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Lstat(name)
	return err == nil && os.SameFile(held, named), nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// counter reads an archive, and counts and bounds it.
type counter struct {
	ctx        context.Context
	in         io.Reader
	done, left int64
	told       int64
	tell       func(done int64)
}

// tellEvery is how often progress is told. Bytes.
const tellEvery = 4 << 20

func (c *counter) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.in.Read(p)
	c.done += int64(n)
	if c.left -= int64(n); c.left < 0 {
		return n, errors.New("its archive expands to more than is allowed: raise the limit if " +
			"the image is to be trusted")
	}
	if c.done-c.told >= tellEvery || err == io.EOF {
		c.told = c.done
		c.tell(c.done)
	}
	return n, err
}
