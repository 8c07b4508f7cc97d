package vhostuser

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// logPage is how many bytes of the guest's memory a bit of the dirty log stands for.
const logPage = 4096

// dirtyLog tells the front end which pages of the guest the device has written, while the guest
// migrates: a bit for each page, least significant first. The zero value logs nothing. Any number
// of goroutines may mark pages.
type dirtyLog struct {
	wanted atomic.Bool // the feature LOG_ALL is set

	mu   sync.RWMutex
	bits []byte // guarded by mu; shared with the front end
}

// set sets the log's file. payload: its size and offset, in bytes.
func (l *dirtyLog) set(payload []byte, fd int) error {
	if len(payload) != 16 {
		return fmt.Errorf("the dirty log is described by %d bytes, not 16", len(payload))
	}
	size, off := binary.LittleEndian.Uint64(payload), binary.LittleEndian.Uint64(payload[8:])
	bits, err := mapShared(fd, size, off)
	if err != nil {
		return fmt.Errorf("the dirty log: %w", err)
	}
	l.replace(bits)
	return nil
}

func (l *dirtyLog) replace(bits []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bits != nil {
		_ = unix.Munmap(l.bits[:cap(l.bits)])
	}
	l.bits = bits
}

// mark notes that a range of the guest was written. Pages for which the log has no bit are ignored.
func (l *dirtyLog) mark(guest, length uint64) {
	if !l.wanted.Load() || length == 0 {
		return
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	for page := guest / logPage; page <= (guest+length-1)/logPage; page++ {
		at := page / 32 * 4
		if at+4 > uint64(len(l.bits)) {
			return
		}
		atomic.OrUint32((*uint32)(unsafe.Pointer(&l.bits[at])), 1<<(page%32))
	}
}

// mapShared maps a part of a file that a front end shares, in whole words. The file must be in
// memory, and as long as the front end says.
func mapShared(fd int, size, off uint64) ([]byte, error) {
	if fd < 0 {
		return nil, errors.New("there is no descriptor")
	}
	const most = 1 << 33 // a log of 256 TiB
	if size == 0 || size > most || off > math.MaxInt64-most || off%logPage != 0 {
		return nil, fmt.Errorf("%d bytes at %d cannot be mapped", size, off)
	}
	if huge, err := pagesOf(fd, off+size); huge > 0 || err != nil {
		return nil, cmp.Or(err, errors.New("the file has huge pages"))
	}
	return unix.Mmap(fd, int64(off), int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}
