package image

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
)

// Source is the bytes of one file of an image, on this machine or far away. Any number of
// goroutines may call its methods. All offsets and lengths are bytes.
type Source interface {
	// ReadAt fills p from off on, or returns an error and how many bytes it has read. It waits for
	// far bytes until ctx ends, and then returns disk.ErrNotNow. It may return that error earlier
	// if waiting is of no use at the moment. With a context that has ended, it returns what is at
	// hand. After any other error, the range is lost.
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)

	// Size is the number of bytes. It never changes, nor do Identity and Parallel.
	Size() int64
	Identity() Identity
	// Parallel is how many reads are worth having under way at once. Each read of a far source
	// takes long, however short it is. 0 or 1 means that the source is near.
	Parallel() int

	// Extent describes the run at off, at most length bytes. An unknown range counts as data.
	// Extent does not wait for anything that is far away.
	Extent(off, length int64) (disk.Extent, error)

	// WillRead announces a read of length bytes, at least 1. It does not wait.
	WillRead(off, length int64)

	// Check returns an error if the bytes may have changed since the source was opened. The error
	// completes the sentence "<file> ...". Check does not wait for anything that is far away.
	Check() error

	// Close is called once, after all other calls have returned.
	Close() error
}

// Unsure is a Source that checks its content, or a part of it, only after it was read.
type Unsure interface {
	Source
	// Unverified reports whether data that was read may turn out to be wrong. Then Verify is always
	// called, even if not everything was read. Unverified does not wait.
	Unverified() bool
	// Agree compares the two descriptions of the content, if there are two. It does not read all of
	// the content, and fetches what it needs. It is always called, once the disk is in use, and
	// waits like Verify. The error is disk.ErrWrongContent if they differ.
	Agree(ctx context.Context) error
	// Verify checks all of the content against its digest, and fetches what is missing for that. It
	// waits until ctx ends, and a later call continues. The error is disk.ErrWrongContent if the
	// digest is wrong.
	Verify(ctx context.Context) error
}

// Identity tells sources apart.
type Identity struct {
	// Digest identifies the content if it is known from the start, such as the digest of a blob.
	// Sources with the same digest have the same content. With "", only reading all of the content
	// identifies it.
	Digest string `json:"digest,omitempty"`

	// These are zero unless the source is a file. If they are the same as before, the file was not
	// touched and need not be read again. Times are nanoseconds since 1970.
	Dev   uint64 `json:"dev"`
	Ino   uint64 `json:"ino"`
	MTime int64  `json:"mtime"`
	CTime int64  `json:"ctime"`
}

// fileSource is a file of this machine.
type fileSource struct {
	file   *os.File
	stat   unix.Stat_t // when it was opened
	digest string      // "": not known

	extents osfile.Extents
}

// NewUnnamedSource makes a source of a file that may have no name. The caller still closes f.
func NewUnnamedSource(f *os.File) (Source, error) {
	again, err := osfile.Reopen(f)
	if err != nil {
		return nil, err
	}
	s, err := NewFileSource(again, "")
	if err != nil {
		return nil, errors.Join(err, again.Close())
	}
	return s, nil
}

// NewFileSource makes a source of a file with a known digest, which nobody changes. Closing the
// source closes the file. After an error, the caller closes it.
func NewFileSource(f *os.File, digest string) (Source, error) {
	s := &fileSource{file: f, digest: digest}
	if err := osfile.Retry(func() error { return unix.Fstat(int(f.Fd()), &s.stat) }); err != nil {
		return nil, &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	return s, nil
}

func (s *fileSource) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if ctx != disk.Cached {
		return s.file.ReadAt(p, off)
	}
	n, err := osfile.ReadCached(s.file, p, off)
	if err == unix.EAGAIN {
		err = disk.ErrNotNow
	}
	return n, err
}

func (s *fileSource) Size() int64 { return s.stat.Size }

func (s *fileSource) Identity() Identity {
	if s.digest != "" {
		return Identity{Digest: s.digest}
	}
	return Identity{
		Dev: uint64(s.stat.Dev), Ino: s.stat.Ino,
		MTime: s.stat.Mtim.Nano(), CTime: s.stat.Ctim.Nano(),
	}
}

func (s *fileSource) Parallel() int { return 1 }

func (s *fileSource) Extent(off, length int64) (disk.Extent, error) {
	n, data, err := s.extents.Seek(s.file, off, length)
	return disk.Extent{Length: n, Data: data}, err
}

// WillRead asks the kernel to read ahead. If that fails, the file is read when it is needed.
func (s *fileSource) WillRead(off, length int64) {
	_ = unix.Fadvise(int(s.file.Fd()), off, length, unix.FADV_WILLNEED)
}

// ErrChanged says that a file was written.
var ErrChanged = errors.New("was changed while it was read; start again when nothing writes to it")

func (s *fileSource) Check() error {
	if s.digest != "" {
		return nil
	}
	var st unix.Stat_t
	if err := osfile.Retry(func() error { return unix.Fstat(int(s.file.Fd()), &st) }); err != nil {
		return fmt.Errorf("cannot be asked whether it was changed: %w", err)
	}
	if st.Size != s.stat.Size && !isDevice(&st) || st.Mtim != s.stat.Mtim {
		return ErrChanged
	}
	return nil
}

func (s *fileSource) Close() error { return s.file.Close() }

// readFull fills p from a source. It fails if the source has become shorter since it was opened.
func readFull(ctx context.Context, s Source, p []byte, off int64) error {
	return osfile.ReadFull(disk.ReaderAt(ctx, s), p, off)
}

// unread makes an error of a read that returned too little: disk.ErrNotNow if the range may still
// come, otherwise a *disk.MediumError.
func unread(ctx context.Context, off, length int64, err error) error {
	switch {
	case errors.Is(err, disk.ErrNotNow):
		return err
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return fmt.Errorf("%w: %w", disk.ErrNotNow, err)
	}
	return &disk.MediumError{Op: "read", Off: off, Length: length, Err: err}
}

// edgesHead is how much of a far source's beginning is read at once. Programs that write an image
// in one go, such as qemu-img, have its header and first tables there. Bytes.
const edgesHead = 512 << 10

// edges is a far source whose beginning and end are in memory while an image is opened. Opening
// reads many small pieces of them.
type edges struct {
	Source
	head, tail []byte
}

// load reads both edges at once.
func (e *edges) load(ctx context.Context) error {
	size := e.Size()
	head, tail := make([]byte, min(size, edgesHead)), make([]byte, min(size, tailSize))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return readFull(ctx, e.Source, head, 0) })
	if size > edgesHead {
		group.Go(func() error { return readFull(ctx, e.Source, tail, size-int64(len(tail))) })
	}
	err := group.Wait()
	if size <= edgesHead {
		copy(tail, head[size-int64(len(tail)):])
	}
	e.head, e.tail = head, tail
	return err
}

// forget frees the memory. It must not be called during a read.
func (e *edges) forget() { e.head, e.tail = nil, nil }

func (e *edges) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	begin := e.Size() - int64(len(e.tail))
	switch {
	case off >= 0 && off+int64(len(p)) <= int64(len(e.head)):
		return copy(p, e.head[off:]), nil
	case off >= begin && off-begin+int64(len(p)) <= int64(len(e.tail)):
		return copy(p, e.tail[off-begin:]), nil
	}
	return e.Source.ReadAt(ctx, p, off)
}
