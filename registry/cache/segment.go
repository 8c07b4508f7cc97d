package cache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

// segmentSize is how much of a blob one file has, in bytes. Segments are removed as a whole.
const segmentSize = 16 << 20

// The header of a segment takes the first page of its file. A hole follows it, and the content
// begins at chunksAt. All numbers are little-endian:
//
//	0     magic, with the version of the format
//	8     chunk size, bytes (4 bytes)
//	12    number of the segment (4)
//	16    size of the blob, bytes (8)
//	24    XXH64 of what stands before it (8)
//	1024  for each chunk the XXH64 of its content, or 1 where that is 0; 0: it is not here (8)
const (
	headerSize  = 4096
	headerMagic = "KVDCACH\x02"
	checkedSize = 24
	sumsAt      = 1024
	sumSize     = 8
	// chunksAt is where the content begins, so that writing a chunk gives the page cache a large
	// folio. Reads of 4 KiB take a quarter longer if chunks begin a page later. The hole takes no
	// space.
	chunksAt = 256 << 10
)

// errDamaged says that a segment file was changed since it was written.
var errDamaged = errors.New("is damaged")

// segmentHeader says which segment a file is.
type segmentHeader struct {
	chunkSize int64 // bytes
	number    int64
	blobSize  int64 // bytes
}

// chunks is how many chunks of the blob are in the segment.
func (h segmentHeader) chunks() int64 {
	size := min(segmentSize, h.blobSize-h.number*segmentSize)
	return (size + h.chunkSize - 1) / h.chunkSize
}

func (h segmentHeader) encode() []byte {
	p := make([]byte, checkedSize+sumSize)
	copy(p, headerMagic)
	binary.LittleEndian.PutUint32(p[8:], uint32(h.chunkSize))
	binary.LittleEndian.PutUint32(p[12:], uint32(h.number))
	binary.LittleEndian.PutUint64(p[16:], uint64(h.blobSize))
	binary.LittleEndian.PutUint64(p[checkedSize:], xxhash.Sum64(p[:checkedSize]))
	return p
}

// contentSum is the header's entry for a chunk that the segment has.
func contentSum(p []byte) uint64 { return max(xxhash.Sum64(p), 1) }

// segment is an open segment file. Its count of users begins with the blob that opened it.
type segment struct {
	file    *os.File
	checked []atomic.Bool // by chunk of the segment: this process has checked its content
	missing atomic.Int32  // number of chunks that were not checked yet
	used    atomic.Bool   // since the sweeper last looked

	users  atomic.Int32
	closed sync.Once
}

// acquire keeps the file open until release. It returns false if the file is closed already.
func (s *segment) acquire() bool {
	for {
		n := s.users.Load()
		if n == 0 {
			return false
		}
		if s.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (s *segment) release() {
	if s.users.Add(-1) == 0 {
		s.file.Close() // its content need not be durable
	}
}

// retire ends the use that keeps an unused segment open. Only the first call does anything.
func (s *segment) retire() { s.closed.Do(s.release) }

// openSegment opens the file of a segment. It makes the file if it is missing, and replaces it if
// it is damaged.
func openSegment(root *osfile.Shared, name string, h segmentHeader) (*segment, error) {
	for range 3 {
		f, err := root.OpenFile(name, os.O_RDWR|os.O_CREATE)
		if err != nil {
			return nil, err
		}
		err = prepare(f, h)
		if err == nil {
			root.Share(f)
			s := &segment{file: f, checked: make([]atomic.Bool, segmentSize/h.chunkSize)}
			s.users.Store(1)
			s.missing.Store(int32(h.chunks()))
			return s, nil
		}
		f.Close()
		if !errors.Is(err, errDamaged) {
			return nil, err
		}
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("segment %s %w again as soon as it is made", name, errDamaged)
}

// prepare writes the header of a new file, and checks that of an existing one.
func prepare(f *os.File, h segmentHeader) error {
	unlock, err := lockRange(f, 0, 1, unix.F_OFD_SETLKW)
	if err != nil {
		return err
	}
	defer unlock()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	want := h.encode()
	switch {
	case !st.Mode().IsRegular():
		return fmt.Errorf("%w: it is not a regular file", errDamaged)
	case st.Size() == 0:
		if _, err := f.WriteAt(want, 0); err != nil {
			return err
		}
		return f.Truncate(headerSize)
	case st.Size() < headerSize:
		return errDamaged
	}
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, 0); err != nil {
		return err
	}
	if string(got) != string(want) {
		return errDamaged
	}
	return nil
}

// check notes that this process has checked chunk i.
func (s *segment) check(i int64) {
	if !s.checked[i].Swap(true) {
		s.missing.Add(-1)
	}
}

// load reads chunk i of the segment. It returns true if the segment has the chunk, unchanged.
func (s *segment) load(i int64, p []byte) (ok bool) {
	var stored [sumSize]byte
	if _, err := s.file.ReadAt(stored[:], sumsAt+i*sumSize); err != nil {
		return false
	}
	sum := binary.LittleEndian.Uint64(stored[:])
	if sum == 0 {
		return false
	}
	// The last chunk of the blob is shorter.
	if _, err := s.file.ReadAt(p, s.at(i)); err != nil {
		return false
	}
	return contentSum(p) == sum
}

// store writes chunk i. Its sum is written after the content: if the process dies in between, the
// segment does not have the chunk.
func (s *segment) store(i int64, p []byte) error {
	if _, err := s.file.WriteAt(p, s.at(i)); err != nil {
		return err
	}
	var sum [sumSize]byte
	binary.LittleEndian.PutUint64(sum[:], contentSum(p))
	_, err := s.file.WriteAt(sum[:], sumsAt+i*sumSize)
	return err
}

// forget removes the chunk from the segment's header.
func (s *segment) forget(i int64) error {
	_, err := s.file.WriteAt(make([]byte, sumSize), sumsAt+i*sumSize)
	return err
}

// at is where the chunk i lies in the file.
func (s *segment) at(i int64) int64 {
	return chunksAt + i*(segmentSize/int64(len(s.checked)))
}

// unlinked reports whether the file was removed.
func (s *segment) unlinked() bool {
	var st unix.Stat_t
	return unix.Fstat(int(s.file.Fd()), &st) == nil && st.Nlink == 0
}

// lockRange locks bytes of a file against its other openings, by this process or another. With
// F_OFD_SETLK it does not wait, and returns unix.EAGAIN.
func lockRange(f *os.File, start, length int64, cmd int) (unlock func(), err error) {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: 0, Start: start, Len: length}
	for {
		err = unix.FcntlFlock(f.Fd(), cmd, &lock)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return func() {
		lock.Type = unix.F_UNLCK
		_ = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock)
	}, nil
}
