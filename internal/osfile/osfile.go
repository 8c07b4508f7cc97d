package osfile

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OpenFlags never follow a link and never block. A FIFO without a writer would block the start for
// ever.
const OpenFlags = unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC

// Retry repeats a system call that a signal interrupted.
func Retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// Call makes a system call on the descriptor of f, and repeats it if a signal interrupted it. A
// Close meanwhile takes effect after the call, so the call never reaches another file with the same
// descriptor. After Close it returns os.ErrClosed.
func Call(f *os.File, call func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	controlErr := conn.Control(func(fd uintptr) {
		err = Retry(func() error { return call(int(fd)) })
	})
	if controlErr != nil {
		return os.ErrClosed // there is no other reason
	}
	return err
}

// Reopen opens a file once more for reading, by its descriptor: it may have no name. The new file
// has an offset of its own.
func Reopen(f *os.File) (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}

// SeekExtent returns the length of the run of data or hole that begins at off, at most length. If
// the file system cannot tell, everything is data. The call moves the descriptor's offset; nothing
// here uses that.
func SeekExtent(f *os.File, off, length int64) (n int64, data bool, err error) {
	end, data, err := seekExtent(f, off)
	return min(end-off, length), data, err
}

// Extents finds data and holes of a file as SeekExtent does, and remembers the last run of data.
// Some file systems (tmpfs) look at each page until the run ends, which takes milliseconds for a
// large file, and would take that long again for each piece.
type Extents struct {
	mu       sync.Mutex
	from, to int64 // data; holes made since may be in it
}

// Seek returns the length of the run of data or hole of f that begins at off, at most length. Holes
// that were made without Forget may be taken for data. Concurrency: as Forget.
func (x *Extents) Seek(f *os.File, off, length int64) (n int64, data bool, err error) {
	x.mu.Lock()
	from, to := x.from, x.to
	x.mu.Unlock()
	if from <= off && off < to {
		return min(to-off, length), true, nil
	}
	end, data, err := seekExtent(f, off)
	if err != nil || !data {
		return min(end-off, length), data, err
	}
	x.mu.Lock()
	x.from, x.to = off, end
	x.mu.Unlock()
	return min(end-off, length), true, nil
}

// Forget is called after a hole was made. Concurrency: any number of calls of Seek and Forget at
// once.
func (x *Extents) Forget() {
	x.mu.Lock()
	x.from, x.to = 0, 0
	x.mu.Unlock()
}

// seekExtent returns where the run of data or hole ends that begins at off. math.MaxInt64: unknown.
func seekExtent(f *os.File, off int64) (end int64, data bool, err error) {
	err = Call(f, func(fd int) (err error) {
		end, data, err = seekEnd(fd, off)
		return err
	})
	if err != nil {
		return off, false, &os.PathError{Op: "seek", Path: f.Name(), Err: err}
	}
	return end, data, nil
}

func seekEnd(fd int, off int64) (end int64, data bool, err error) {
	// A hole may be punched between the two calls. Then try again.
	for range 4 {
		begin, err := seek(fd, off, unix.SEEK_DATA)
		switch {
		case err == unix.ENXIO:
			return lastHole(fd, off)
		case err == unix.EINVAL || err == unix.EOPNOTSUPP:
			return math.MaxInt64, true, nil
		case err != nil:
			return 0, false, err
		case begin > off:
			return begin, false, nil
		}
		end, err := seek(fd, off, unix.SEEK_HOLE)
		if err == unix.ENXIO {
			return lastHole(fd, off)
		}
		if err != nil {
			return 0, false, err
		}
		if end > off {
			return end, true, nil
		}
	}
	return off + StatBlock, true, nil // a hole may always count as data
}

// lastHole is the run at off in a file that has no data from there on. A range behind the end of
// the file is no hole: the file was made shorter. It counts as data, because a read of it fails,
// and a copy without it would have zeros in place of lost data.
func lastHole(fd int, off int64) (end int64, data bool, err error) {
	var st unix.Stat_t
	switch err := Retry(func() error { return unix.Fstat(fd, &st) }); {
	case err != nil:
		return 0, false, err
	case off >= st.Size:
		return math.MaxInt64, true, nil
	}
	return st.Size, false, nil
}

func seek(fd int, off int64, whence int) (at int64, err error) {
	err = Retry(func() (err error) { at, err = unix.Seek(fd, off, whence); return err })
	return at, err
}

// ReadFull fills p from r at off. If the file ends before, it returns io.ErrUnexpectedEOF.
func ReadFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// AvailableSpace returns how many bytes an unprivileged user can still write to the directory's
// file system.
func AvailableSpace(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := Retry(func() error { return unix.Statfs(dir, &st) }); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	unit := uint64(max(st.Frsize, 1)) // Linux always says it
	return int64(min(st.Bavail, math.MaxInt64/unit) * unit), nil
}

// StatBlock is the unit of st_blocks in bytes. It does not depend on the file system's block size.
const StatBlock = 512

// Nameless makes a file in a directory that disappears when it is closed, also if the process is
// killed.
func Nameless(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err == nil {
		return f, nil
	}
	// Not every file system has files without names, such as NFS.
	f, err = os.CreateTemp(dir, ".kubevirt-disk-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// NamelessIn is Nameless for a directory that is open.
func NamelessIn(dir *os.Root) (*os.File, error) {
	name := rand.Text() + ".partial" // what a crash leaves is found by that
	f, err := dir.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err := dir.Remove(name); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// ReadCached reads from a file as its ReadAt does, if the page cache has all of the range
// (preadv2(2), RWF_NOWAIT). Otherwise the error is EAGAIN, and the kernel has begun to read the
// rest. A file system that cannot tell reads as usual. The file may be closed meanwhile.
func ReadCached(f *os.File, p []byte, off int64) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	iov := unix.Iovec{Base: &p[0]}
	iov.SetLen(len(p))
	err = Call(f, func(fd int) error {
		got, _, errno := unix.Syscall6(unix.SYS_PREADV2, uintptr(fd),
			uintptr(unsafe.Pointer(&iov)), 1, uintptr(off), 0, unix.RWF_NOWAIT)
		if errno != 0 {
			return errno
		}
		n = int(got)
		return nil
	})
	switch {
	case err == nil && n == len(p):
		return n, nil
	case err == nil && n > 0, err == unix.EAGAIN:
		return 0, unix.EAGAIN
	}
	return f.ReadAt(p, off) // the file ends here, or the error says why it cannot be read
}
