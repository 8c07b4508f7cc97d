package served

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry"
)

// recordFor is how long the reads of a disk are recorded, from its first read.
const recordFor = time.Minute

// recorder writes a file with the first reads of guests, in order.
type recorder struct {
	path string
	log  *zap.Logger

	mu    sync.Mutex
	disks []*diskRecord // guarded by mu
	saved int           // guarded by mu; blocks of all disks in the file; 0: no file yet
}

// diskRecord has the reads of one disk so far.
type diskRecord struct {
	ended atomic.Bool // its minute is over

	mu    sync.Mutex
	order registry.BootDisk // guarded by mu
	seen  map[int64]bool    // guarded by mu; nil: no reads yet
}

// newRecorder checks that the file can be made. It returns nil if nothing is recorded.
func newRecorder(path string, name options.Setting, log *zap.Logger) (*recorder, error) {
	if path == "" {
		return nil, nil
	}
	err := osfile.CheckWritable(filepath.Dir(path))
	if err == nil {
		err = checkOrderFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("what guests read when they boot cannot be recorded: name a file "+
			"that can be made with %s: %w", name, err)
	}
	return &recorder{path: path, log: log}, nil
}

// checkOrderFile checks that only an earlier record is replaced: the path may be a mistake, such as
// that of an image.
func checkOrderFile(path string) error {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return nil // it can be made
	case !info.Mode().IsRegular():
		return fmt.Errorf("%q is not a regular file", path)
	}
	f, err := osfile.OpenRegular(path)
	if err != nil {
		return err
	}
	return errors.Join(isOrder(f), f.Close())
}

func isOrder(f *os.File) error {
	if info, err := f.Stat(); err != nil || info.Size() == 0 {
		return err
	}
	if _, err := registry.ReadBootOrder(f); err != nil {
		return fmt.Errorf("%q is there, and is no such file: %w", f.Name(), err)
	}
	return nil
}

// disk returns the function to call for each read of a disk. nil: nothing is recorded.
func (r *recorder) disk(name string, size int64) (reads func(off, length int64)) {
	if r == nil {
		return nil
	}
	d := &diskRecord{order: registry.BootDisk{Name: name, Size: size}}
	r.mu.Lock()
	r.disks = append(r.disks, d)
	r.mu.Unlock()
	return func(off, length int64) {
		if !d.ended.Load() && length > 0 && d.read(off, length) {
			time.AfterFunc(recordFor, func() {
				d.ended.Store(true)
				r.save()
			})
		}
	}
}

// read records a range, and reports whether it is the first.
func (d *diskRecord) read(off, length int64) (first bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if first = d.seen == nil; first {
		d.seen = make(map[int64]bool)
	}
	end := min(off+length, d.order.Size) // the rest is behind the end of the image
	for block := off / registry.BootBlock; block*registry.BootBlock < end; block++ {
		if !d.seen[block] && len(d.seen) < registry.MaxBootBlocks {
			d.seen[block] = true
			d.order.Add(block)
		}
	}
	return first
}

// save writes the file, if there are more reads than in the file.
func (r *recorder) save() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var all registry.BootOrder
	blocks := 0
	for _, d := range r.disks {
		d.mu.Lock()
		order := d.order
		order.Blocks = append([]registry.BootRun(nil), order.Blocks...)
		blocks += len(d.seen)
		d.mu.Unlock()
		if len(order.Blocks) > 0 {
			all.Disks = append(all.Disks, order)
		}
	}
	if blocks == 0 {
		r.log.Warn("no guest has read from an image, so nothing was recorded: a disk in copy mode "+
			"none, and one that was complete at the start, use no image",
			zap.String("file", r.path))
	}
	if blocks == r.saved {
		return
	}
	if err := writeOrder(r.path, &all); err != nil {
		r.log.Warn("what guests read first cannot be recorded", zap.Error(err))
		return
	}
	r.saved = blocks
	r.log.Info("what guests read first was recorded", zap.String("file", r.path),
		zap.Int("disks", len(all.Disks)), zap.Int("bytes", blocks*registry.BootBlock))
}

// writeOrder replaces the file in one step, if checkOrderFile allows it.
func writeOrder(path string, order *registry.BootOrder) error {
	path, err := osfile.ResolvedFile(path)
	if err != nil {
		return err
	}
	out, err := durable.CreateNamed(path, 0o644, isOrder)
	if err != nil {
		return err
	}
	_, err = order.WriteTo(out.File)
	return out.FinishSynced(err)
}
