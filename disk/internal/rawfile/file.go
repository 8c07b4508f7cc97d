package rawfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
)

// MarksDir is a directory next to raw files. It has the names of the files that were served raw.
const MarksDir = ".kubevirt-disk"

// MapMagic begins the map of a disk: the file that says which blocks are in the disk's raw file.
// The other blocks are in the image.
const MapMagic = "KVDMAP1\n"

// Options are the options of a File. The zero value works.
type Options struct {
	ReadOnly bool
	// Durable makes Flush write to storage. Without it, Flush only promises that the data survives
	// the end of the process.
	Durable bool
	// Private says that nobody else changes the file. So the disk can remember where its holes are.
	Private bool
	// Guest says that the calls are a guest's, so that the Map shows the guest's work.
	Guest bool
	// Killed says that the last user of the file was killed, and could not drop its pages as Close
	// does. If a flush of that user had failed, the next flush would succeed without the data.
	Killed bool
}

// File is a raw file as a disk. It implements Disk, Discarder, Zeroer, Extenter and Mapper.
type File struct {
	File    *os.File
	size    atomic.Int64 // bytes; only Grow changes it
	opt     Options
	device  bool        // it is a block device
	noPunch atomic.Bool // the file system cannot punch holes: zeros are written instead
	failed  atomic.Bool // a flush failed
	holes   *holeMap    // nil: others may change the file
	guard   *cacheGuard // nil: others may change the file, or it is read-only
	trail   *Trail      // nil: the calls are not a guest's
	extents osfile.Extents

	seen atomic.Pointer[holeMap] // for Map, if holes is nil; nil: Map was not called yet

	// held during fdatasync: the kernel reports a failure only once per open file
	flushMu sync.Mutex
	sync    func(fd int) error
	forget  func(fd int) error // drops the file's clean pages from the page cache
}

var (
	_ disk.Discarder = (*File)(nil)
	_ disk.Zeroer    = (*File)(nil)
	_ disk.Extenter  = (*File)(nil)
)

// Open opens a regular file as a disk. Its size must be a positive multiple of SectorSize. No part
// of the path may be a link.
func Open(path string, opt Options) (*File, error) {
	flags := os.O_RDWR
	if opt.ReadOnly {
		flags = os.O_RDONLY
	}
	f, err := osfile.OpenFile(path, flags|osfile.OpenFlags, 0)
	if err != nil {
		return nil, err
	}
	disk, err := FromOpen(f, opt)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return disk, nil
}

// FromOpen makes a disk of an open file or block device. The disk owns the file from then on.
func FromOpen(f *os.File, opt Options) (*File, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size, device := st.Size(), st.Mode().Type() == fs.ModeDevice
	if device {
		size, err = f.Seek(0, io.SeekEnd)
	}
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() && !device {
		return nil, fmt.Errorf("%q is neither a regular file nor a block device", f.Name())
	}
	if size == 0 || size%disk.SectorSize != 0 {
		return nil, fmt.Errorf("%q has a size of %d bytes, which is not a positive multiple of %d",
			f.Name(), size, disk.SectorSize)
	}
	if opt.Killed && opt.Durable {
		_ = osfile.Call(f, forgetCached) // see Close
	}
	disk := &File{File: f, opt: opt, sync: unix.Fdatasync, forget: forgetCached}
	disk.size.Store(size)
	disk.device = device
	if opt.Guest {
		disk.trail = NewTrail(disk.Size)
	}
	if opt.Private {
		disk.holes = newHoleMap(disk)
		if !opt.ReadOnly {
			disk.guard = newCacheGuard(size, disk.holes)
		}
	}
	return disk, nil
}

// Size is the size of the file when it was opened, or as Grow has made it.
func (f *File) Size() int64 { return f.size.Load() }

// ReadAt reads from the page cache or the storage below it. Concurrency: as Disk.
func (f *File) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off >= 0 && off <= f.Size()-int64(len(p)) {
		f.trail.Read(off, int64(len(p)))
		if f.holes.empty(off, int64(len(p))) {
			clear(p)
			return len(p), nil
		}
	}
	read := (*os.File).ReadAt
	if ctx == disk.Cached {
		read = osfile.ReadCached
	}
	n, err := read(f.File, p, off)
	switch err {
	case nil:
		return n, nil
	case unix.EAGAIN:
		return n, disk.ErrNotNow
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF // the file has become shorter
	}
	return n, &disk.MediumError{Op: "read", Off: off + int64(n), Length: int64(len(p) - n),
		Err: err}
}

// WriteAt stores p in the page cache. Concurrency and durability: as Disk.
func (f *File) WriteAt(_ context.Context, p []byte, off int64) (n int, err error) {
	if err := f.writable(); err != nil {
		return 0, err
	}
	// A write past the end would enlarge the file, unnoticed.
	if off < 0 || off > f.Size()-int64(len(p)) {
		return 0, OutOfRange("write", off, int64(len(p)), f.Size())
	}
	f.guard.through(off, int64(len(p)))
	f.holes.note(off, int64(len(p)))
	f.seen.Load().note(off, int64(len(p)))
	f.trail.Write(off, int64(len(p)))
	for n < len(p) {
		m, err := f.File.WriteAt(p[n:min(n+cachedWrite, len(p))], off+int64(n))
		n += m
		if err != nil {
			return n, f.writeError(off+int64(n), int64(len(p)-n), err)
		}
	}
	return n, nil
}

// Flush makes all writes durable, if the disk is. Durability: as Disk.
func (f *File) Flush() error {
	if f.failed.Load() {
		return disk.ErrFailed
	}
	if !f.opt.Durable || f.opt.ReadOnly {
		return nil
	}
	f.flushMu.Lock()
	defer f.flushMu.Unlock()
	if f.failed.Load() {
		return disk.ErrFailed
	}
	if err := osfile.Call(f.File, f.sync); err != nil {
		// The kernel has dropped the pages or marked them clean, so a later success would mean
		// nothing.
		f.failed.Store(true)
		return fmt.Errorf("%w: flush of %q: %w", disk.ErrFailed, f.File.Name(), err)
	}
	return nil
}

// Discard punches a hole. Concurrency and durability: as Disk.
func (f *File) Discard(_ context.Context, off, length int64) error {
	return f.deallocate("discard", off, length)
}

// Zero punches a hole, too, so that a guest that zeroes a whole disk does not fill the work
// directory. Concurrency and durability: as Disk.
func (f *File) Zero(_ context.Context, off, length int64) error {
	if length > 0 && length < holeSize {
		// No block can be freed, and a write into the page cache is cheaper than a system call.
		return f.writeZeros(off, length)
	}
	return f.deallocate("write", off, length)
}

// deallocate punches out the whole blocks of the range and writes zeros to the rest.
func (f *File) deallocate(op string, off, length int64) error {
	if err := f.writable(); err != nil {
		return err
	}
	if off < 0 || length < 0 || off > f.Size()-length {
		return OutOfRange(op, off, length, f.Size())
	}
	if length == 0 {
		return nil
	}
	if f.noPunch.Load() {
		return f.writeZeros(off, length)
	}
	f.guard.through(off, length) // the partial blocks at both ends become dirty
	err := osfile.Call(f.File, func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, length)
	})
	if err == unix.EINVAL && f.device {
		return f.writeZeros(off, length) // the file system's blocks are larger than a sector
	}
	switch err {
	case nil:
		f.extents.Forget()
		f.trail.Discard(off, length)
		return nil
	case unix.EOPNOTSUPP, unix.ENOSYS:
		f.noPunch.Store(true)
		return f.writeZeros(off, length)
	default:
		return f.writeError(off, length,
			&os.PathError{Op: "fallocate", Path: f.File.Name(), Err: err})
	}
}

// writeZeros zeroes a range by writing to it.
func (f *File) writeZeros(off, length int64) error {
	for length > 0 {
		n, err := f.WriteAt(context.Background(), zeros[:min(length, int64(len(zeros)))], off)
		if err != nil {
			return err
		}
		off, length = off+int64(n), length-int64(n)
	}
	return nil
}

// Extent asks the file system what is allocated. Concurrency: as Disk. While the range is being
// written, the answer may be the old or the new one.
func (f *File) Extent(_ context.Context, off, length int64) (disk.Extent, error) {
	if off < 0 || length <= 0 || off > f.Size()-length {
		return disk.Extent{}, OutOfRange("extent", off, length, f.Size())
	}
	n, data, err := f.extents.Seek(f.File, off, length)
	if err != nil {
		return disk.Extent{}, &disk.MediumError{Op: "read", Off: off, Length: length, Err: err}
	}
	return disk.Extent{Length: n, Data: data}, nil
}

// Close closes the file. It does not flush. After a failed flush the page cache holds data that
// storage does not have. The kernel takes these pages for clean and drops them at any time. Close
// drops them at once, so that the next user of the file reads what storage has.
func (f *File) Close() error {
	if f.failed.Load() {
		_ = osfile.Call(f.File, f.forget) // if it fails, reads come from the cache as before
	}
	return f.File.Close()
}

func forgetCached(fd int) error { return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED) }

// writable returns the reason why nothing can be written, or nil.
func (f *File) writable() error {
	if f.opt.ReadOnly {
		return disk.ErrReadOnly
	}
	if f.failed.Load() {
		return disk.ErrFailed
	}
	return nil
}

// writeError turns an error of the file system into one of package disk. The range is the part that
// was not written.
func (f *File) writeError(off, length int64, err error) error {
	switch {
	case disk.IsNoSpace(err):
		return fmt.Errorf("%w: %w", disk.ErrNoSpace, err)
	case errors.Is(err, unix.EROFS) || errors.Is(err, unix.EBADF) || errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %w", disk.ErrReadOnly, err)
	default:
		return &disk.MediumError{Op: "write", Off: off, Length: length, Err: err}
	}
}

// OutOfRange is the error for a range that the caller should have refused.
func OutOfRange(op string, off, length, size int64) error {
	return fmt.Errorf("%s of %d bytes at %d is outside of a disk of %d bytes", op, length, off,
		size)
}

var _ disk.Accountant = (*File)(nil)

// Usage asks the file system, which may count less than was written, for example because it
// compresses. The file may be closed meanwhile.
func (f *File) Usage() (disk.Usage, error) {
	var st unix.Stat_t
	var room unix.Statfs_t
	err := osfile.Call(f.File, func(fd int) error {
		return errors.Join(unix.Fstat(fd, &st), unix.Fstatfs(fd, &room))
	})
	if err != nil {
		return disk.Usage{}, fmt.Errorf("the space of %q cannot be told: %w", f.File.Name(), err)
	}
	if f.device {
		return disk.Usage{Used: f.Size(), Available: f.Size()}, nil // a device has all of its space
	}
	return disk.Usage{Used: st.Blocks * osfile.StatBlock,
		Available: int64(room.Bavail) * int64(room.Bsize)}, nil
}

// Grow enlarges the file by a hole while the disk is in use. When Grow returns nil, the new size is
// as durable as after a Flush. After an error the disk has its former size, and the file may have
// the new one. One call at a time.
func (f *File) Grow(size int64) error {
	if err := f.writable(); err != nil {
		return err
	}
	if before := f.Size(); size < before || size%disk.SectorSize != 0 {
		return fmt.Errorf("a disk of %d bytes cannot get %d bytes", before, size)
	}
	// Another program may have made the file larger and written there. The disk must not show that.
	st, err := f.File.Stat()
	if err != nil {
		return err
	}
	if st.Size() > f.Size() {
		if err := f.truncate(f.Size()); err != nil {
			return err
		}
	}
	if err := f.truncate(size); err != nil {
		return err
	}
	if err := f.Flush(); err != nil {
		return err
	}
	if f.holes != nil {
		f.holes.written.grow(size)
	}
	if f.guard != nil {
		f.guard.wanted.grow(size)
		f.guard.cached.grow(size)
	}
	f.size.Store(size)
	return nil
}

func (f *File) truncate(size int64) error {
	err := osfile.Call(f.File, func(fd int) error { return unix.Ftruncate(fd, size) })
	if err != nil {
		return &os.PathError{Op: "truncate", Path: f.File.Name(), Err: err}
	}
	return nil
}

var _ disk.Mapper = (*File)(nil)

// Map shows what is stored in the file. If others may change the file, the file is the image
// itself, and the first call asks the file system. See Mapper.
func (f *File) Map() *disk.Map {
	m := disk.NewMap(f.Size())
	holes := f.holes
	if holes == nil {
		if holes = f.seen.Load(); holes == nil {
			holes = newHoleMap(f)
			f.seen.Store(holes)
		}
	}
	for i := range m.Cells {
		off, length := m.Range(i)
		stored := holes.written.bytes(off, length)
		m.Cells[i] = disk.Cell{Copied: stored, Hole: length - stored}
	}
	f.trail.Mark(m, time.Now())
	if !f.opt.Private {
		for i := range m.Cells {
			c := &m.Cells[i]
			c.Image, c.Copied = c.Copied, 0
		}
	}
	return m
}
