package cache

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

const (
	// sweepEvery is how often the sweeper looks, and so how exactly it knows the order of use.
	sweepEvery = 30 * time.Second
	// enough is the part of the limit to which a cache that is too large is reduced.
	enough = 0.9
	// leastChunks is the part of the limit that chunks always have, 1/leastChunks, so that Others
	// in use do not take all of it.
	leastChunks = 4
)

// stored counts written bytes, and wakes the sweeper after a part of the limit.
func (c *Cache) stored(n int64) {
	if c.opt.Size > 0 && c.written.Add(n) > c.opt.Size/32 {
		c.written.Store(0)
		select {
		case c.crowded <- struct{}{}:
		default:
		}
	}
}

// sweep records uses, and removes the files that were unused for longest, until the cache is
// closed.
func (c *Cache) sweep() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.life.Done():
			c.touch()
			return
		case <-tick.C:
		case <-c.crowded:
		}
		c.touch()
		if c.opt.Size > 0 {
			if err := c.shrink(); err != nil {
				c.warn("the cache cannot be kept below its size", err)
			}
		}
	}
}

// touch tells all processes which segments this one has used, and closes segments that another one
// has removed.
func (c *Cache) touch() {
	c.mu.Lock()
	open := slices.Clone(c.open)
	c.mu.Unlock()
	for _, s := range open {
		seg := s.acquire()
		if seg == nil {
			continue
		}
		if seg.unlinked() {
			s.drop()
		} else if seg.used.Swap(false) {
			if err := unix.Futimes(int(seg.file.Fd()), nil); err != nil {
				c.warn("the cache cannot note what is used", err)
			}
		}
		seg.release()
	}
}

// found is a segment file of the directory, or one of Others.
type found struct {
	name   string
	bytes  int64 // that it takes
	used   time.Time
	remove func() error // of Others; nil: it is a segment
}

// shrink removes segments if the directory is over its limit, unless another process does.
func (c *Cache) shrink() error {
	lock, err := c.root.OpenFile(path.Join(version, "lock"), os.O_RDWR|os.O_CREATE)
	if err != nil {
		return err
	}
	defer lock.Close()
	c.root.Share(lock)
	unlock, err := lockRange(lock, 0, 1, unix.F_OFD_SETLK)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	all, chunks, err := c.segments()
	total := chunks
	if c.opt.Others != nil {
		others, bad := c.opt.Others()
		err = errors.Join(err, bad)
		for _, o := range others {
			all = append(all, found{o.Name, o.Bytes, o.Used, o.Remove})
			total += o.Bytes
		}
	}
	if total <= c.opt.Size {
		return err
	}
	slices.SortFunc(all, func(a, b found) int { return a.used.Compare(b.used) })
	before, removed := total, 0
	for _, f := range all {
		if float64(total) <= enough*float64(c.opt.Size) {
			break
		}
		if f.remove == nil && chunks <= c.opt.Size/leastChunks {
			continue
		}
		if bad := c.removeFound(f); bad != nil {
			if !errors.Is(bad, ErrInUse) { // no permission, for example: others may go
				err = bad
			}
			continue
		}
		if f.remove == nil {
			chunks -= f.bytes
		}
		total -= f.bytes
		removed++
	}
	if removed == 0 {
		return err
	}
	c.touch() // closes removed segments
	c.removeEmpty(all)
	c.log.Info("the cache was over its size, and the least recently used data was removed",
		zap.Int64("bytes", before), zap.Int64("left", total), zap.Int("files", removed))
	return err
}

func (c *Cache) removeFound(f found) error {
	if f.remove != nil {
		return f.remove()
	}
	if err := c.root.Remove(f.name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// segments returns all segment files in the directory, of every process, and their size in bytes.
func (c *Cache) segments() (all []found, total int64, err error) {
	err = fs.WalkDir(c.root.FS(), version, func(name string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil || !d.Type().IsRegular() || path.Dir(name) == version {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		f := found{name: name, bytes: info.Size(), used: info.ModTime()}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			f.bytes = st.Blocks * 512
		}
		all = append(all, f)
		total += f.bytes
		return nil
	})
	return all, total, err
}

// removeEmpty removes empty directories. If one is in use again by then, it stays.
func (c *Cache) removeEmpty(all []found) {
	seen := make(map[string]bool)
	for _, f := range all {
		if f.remove != nil {
			continue
		}
		for dir := path.Dir(f.name); dir != version; dir = path.Dir(dir) {
			if seen[dir] {
				break
			}
			seen[dir] = true
		}
	}
	// the inner ones first
	inner := func(a, b string) int { return len(b) - len(a) }
	for _, dir := range slices.SortedFunc(maps.Keys(seen), inner) {
		_ = c.root.Remove(dir) // mostly it is not empty
	}
}
