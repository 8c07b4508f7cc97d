package rawfile

import (
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/osfile"
)

// preallocateFrom is the smallest range in bytes that is worth a system call of its own.
const preallocateFrom = 256 << 10

// Places preallocates ranges of a file before they are written through the page cache. Ext4
// reserves space for each block of a write one by one, which is two fifths of the cost of filling a
// new file. File systems that reserve once per write gain nothing by it. A nil Places does nothing.
// Any number of goroutines may use it.
type Places struct {
	file    *os.File
	busy    func() bool // a guest is active and should not wait for the journal, too; nil: no guest
	useless atomic.Bool // the file cannot be preallocated, for example because it has no extents
}

// NewPlaces returns nil if preallocating does not help.
func NewPlaces(f *os.File, busy func() bool) *Places {
	if fileSystem(f) != unix.EXT4_SUPER_MAGIC {
		return nil
	}
	return &Places{file: f, busy: busy}
}

// before is called before a range that reads as zeros is written. The range still reads as zeros
// afterwards. Errors are ignored, because the write meets them, too.
func (p *Places) before(off, length int64) {
	if p == nil || length < preallocateFrom || p.useless.Load() || p.busy != nil && p.busy() {
		return
	}
	err := osfile.Call(p.file, func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, off, length)
	})
	if err != nil && !osfile.IsFull(err) {
		p.useless.Store(true)
	}
}
