package osfile

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ReadCached reads from a file as its ReadAt does, if the page cache has all of the range
// (preadv2(2), RWF_NOWAIT). Otherwise the error is EAGAIN, and the kernel has begun to read what is
// missing. A file system that cannot tell reads as usual.
func ReadCached(f *os.File, p []byte, off int64) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	iov := unix.Iovec{Base: &p[0]}
	iov.SetLen(len(p))
	n, _, errno := unix.Syscall6(unix.SYS_PREADV2, f.Fd(), uintptr(unsafe.Pointer(&iov)), 1,
		uintptr(off), 0, unix.RWF_NOWAIT)
	switch {
	case errno == 0 && int(n) == len(p):
		return len(p), nil
	case errno == 0 && n > 0, errno == unix.EAGAIN:
		return 0, unix.EAGAIN
	}
	return f.ReadAt(p, off) // the file ends here, or it says why it cannot be read
}
