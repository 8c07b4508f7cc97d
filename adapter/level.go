package adapter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
)

// write makes a level. change writes the changes of the level, and returns the size of the disk.
// The level is synced while the next one is made; stored waits for the sync.
func (b *builder) write(ctx context.Context, l *Level, below string,
	change func(dst io.WriterAt) (int64, error)) error {
	f, err := b.claim(ctx, l)
	if err != nil {
		return err
	}
	if f == nil { // another process has just made the level
		_, err = change(nil)
		return err
	}
	if err = fill(f, l, below, change); err == nil {
		err = b.stored() // a level gets its name after the levels below it
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()), f.Close())
	}
	done := make(chan error, 1)
	b.storing = done
	name := filepath.Join(b.dir, l.File)
	go func() { done <- store(f, name) }()
	return nil
}

// fill writes a level into an empty file.
func fill(f *os.File, l *Level, below string, change func(dst io.WriterAt) (int64, error)) error {
	out, err := qcow2.NewAppender(f, qcow2.AppendOptions{Backing: below})
	if err != nil {
		return err
	}
	size, err := change(out)
	if err != nil {
		return err
	}
	if l.Bytes, err = out.Finish(size); err != nil {
		err = fmt.Errorf("%q: %w", f.Name(), err)
	}
	return err
}

// store syncs a level to storage, and gives it its name.
func store(f *os.File, name string) error {
	err := f.Sync()
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()), f.Close())
	}
	// Close comes last: until then the file is locked, and other makers of this level wait.
	return errors.Join(syncDir(filepath.Dir(name)), f.Close())
}

// stored waits until the last level has its name.
func (b *builder) stored() error {
	if b.storing == nil {
		return nil
	}
	err := <-b.storing
	b.storing = nil
	return err
}

// partialSuffix is the suffix of incomplete files.
const partialSuffix = ".partial"

// isPartial reports whether a file has the name of an incomplete level or state, of any version.
// Other programs may have files in the directory.
func isPartial(name string) bool {
	stem, ok := strings.CutSuffix(name, partialSuffix)
	if !ok || !strings.Contains(stem, ".qcow2") && !strings.Contains(stem, stateSuffix) {
		return false
	}
	return slices.ContainsFunc([]string{".empty.", ".layer-", ".image-"},
		func(of string) bool { return strings.HasPrefix(stem, of) })
}

// claim opens the file in which a level is made, locked and empty. If a killed process has left the
// file behind, claim takes it over. Other makers of this level wait; they get nil once the level
// exists.
func (b *builder) claim(ctx context.Context, l *Level) (*os.File, error) {
	f, err := flock.Claim(ctx, b.partial(l.File))
	if err != nil {
		return nil, err
	}
	b.shared.Share(f) // other makers wait for the file, or take it over
	there, err := b.find(l)
	if there || err != nil {
		return nil, errors.Join(err, os.Remove(f.Name()), f.Close())
	}
	if err := f.Truncate(0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// partial is the path of a file while it is being made.
func (b *builder) partial(name string) string {
	return filepath.Join(b.dir, "."+name+partialSuffix)
}

// sweep removes the incomplete files of killed processes. If an image has changed meanwhile, its
// old levels are never made again, so claim would not find these files.
func (b *builder) sweep() {
	entries, _ := os.ReadDir(b.dir) // making a level there reports the error
	for _, e := range entries {
		if isPartial(e.Name()) {
			_ = flock.Discard(filepath.Join(b.dir, e.Name())) // a file that stays only takes room
		}
	}
}

func syncDir(dir string) error {
	f, err := osfile.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// counter reads an archive, counts its bytes, and enforces their limit.
type counter struct {
	ctx        context.Context
	in         io.Reader
	done, left int64
	told       int64
	tell       func(done int64)
}

// tellEvery is how many bytes are read between two reports of progress.
const tellEvery = 4 << 20

func (c *counter) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.in.Read(p)
	c.done += int64(n)
	if c.left -= int64(n); c.left < 0 {
		return n, errors.New("its archive expands to more than the layers of an image may " +
			"have together")
	}
	if c.done-c.told >= tellEvery || err == io.EOF {
		c.told = c.done
		c.tell(c.done)
	}
	return n, err
}
