package rawfile

import (
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/osfile"
)

// preallocateFrom is the least that is worth a system call of its own. Bytes.
const preallocateFrom = 256 << 10

// Places gives ranges of a file their place on storage before they are written through the page
// cache: ext4 reserves space for each block of a write, and notes that for each, which is two
// fifths of what it costs to fill a new file. File systems that do so once for a write would only
// do it twice. A nil one does nothing. Any number of goroutines.
type Places struct {
	file    *os.File
	busy    func() bool // a guest is there, who should not wait for a journal, too; nil: none is
	useless atomic.Bool // the file cannot have places before it is written, as without extents
}

// NewPlaces returns nil where it is of no use.
func NewPlaces(f *os.File, busy func() bool) *Places {
	if fileSystem(f) != unix.EXT4_SUPER_MAGIC {
		return nil
	}
	return &Places{file: f, busy: busy}
}

// before is called before a range is written that reads as zeros until then, and still does
// afterwards. What goes wrong is no matter, as the write meets it, too.
func (p *Places) before(off, length int64) {
	if p == nil || length < preallocateFrom || p.useless.Load() || p.busy != nil && p.busy() {
		return
	}
	err := osfile.Retry(func() error {
		return unix.Fallocate(int(p.file.Fd()),
			unix.FALLOC_FL_KEEP_SIZE, off, length)
	})
	if err != nil && !osfile.IsFull(err) {
		p.useless.Store(true)
	}
}
