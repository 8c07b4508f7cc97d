package osfile

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ReadCached reads from a file as its ReadAt does, if the page cache has all of the range
// (preadv2(2), RWF_NOWAIT). Otherwise the error is EAGAIN, and the kernel has begun to read what is
// missing. A file system that cannot tell reads as usual. The file may be closed meanwhile.
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
	return f.ReadAt(p, off) // the file ends here, or it says why it cannot be read
}
