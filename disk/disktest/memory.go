package disktest

import (
	"context"
	"fmt"
	"sync"

	"kubevirt.io/disk/disk"
)

// pageSize is the size in bytes of one allocation of Memory.
const pageSize = 4 << 10

// Memory is a sparse disk in memory with every optional interface. Every call is atomic. Only pages
// that are written take memory.
type Memory struct {
	size int64

	mu    sync.RWMutex
	pages map[int64]*[pageSize]byte // guarded by mu; by page number; a missing page is zeros
	// guarded by mu; pages that may still be allocated; negative: any number
	budget int64
}

var (
	_ disk.Disk      = (*Memory)(nil)
	_ disk.Discarder = (*Memory)(nil)
	_ disk.Zeroer    = (*Memory)(nil)
	_ disk.Extenter  = (*Memory)(nil)
)

// NewMemory makes a disk of size bytes, a positive multiple of disk.SectorSize. How much it holds
// is not limited.
func NewMemory(size int64) *Memory {
	if size <= 0 || size%disk.SectorSize != 0 {
		size = max(disk.SectorSize, (size+disk.SectorSize-1)/disk.SectorSize*disk.SectorSize)
	}
	return &Memory{size: size, pages: make(map[int64]*[pageSize]byte), budget: -1}
}

// SetFree limits how many more bytes can be allocated, rounded down to pages, like a file system
// that fills up. A write that needs more stores what there is space for and returns
// disk.ErrNoSpace. Discarding gives space back. A negative number lifts the limit.
func (m *Memory) SetFree(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.budget = bytes / pageSize
	if bytes < 0 {
		m.budget = -1
	}
}

// Allocated returns how many bytes of memory the content takes.
func (m *Memory) Allocated() int64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return int64(len(m.pages)) * pageSize
}

func (m *Memory) Size() int64  { return m.size }
func (m *Memory) Flush() error { return nil }
func (m *Memory) Close() error { return nil }

func (m *Memory) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	if err := m.check("read", off, int64(len(p))); err != nil {
		return 0, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	m.each(off, int64(len(p)), func(page, begin, end, at int64) {
		if data := m.pages[page]; data != nil {
			copy(p[at:], data[begin:end])
		} else {
			clear(p[at : at+end-begin])
		}
	})
	return len(p), nil
}

func (m *Memory) WriteAt(_ context.Context, p []byte, off int64) (int, error) {
	if err := m.check("write", off, int64(len(p))); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	stored, full := 0, false
	m.each(off, int64(len(p)), func(page, begin, end, at int64) {
		data := m.pages[page]
		if full = full || data == nil && m.budget == 0; full {
			return
		}
		if data == nil {
			data = new([pageSize]byte)
			m.pages[page] = data
			m.budget-- // without a limit the number only gets more negative
		}
		stored += copy(data[begin:end], p[at:])
	})
	if full {
		return stored, disk.ErrNoSpace
	}
	return stored, nil
}

// Discard frees whole pages and zeroes the rest.
func (m *Memory) Discard(_ context.Context, off, length int64) error {
	if err := m.check("discard", off, length); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.each(off, length, func(page, begin, end, _ int64) {
		data := m.pages[page]
		switch {
		case data == nil:
		case end-begin == pageSize:
			delete(m.pages, page)
			if m.budget >= 0 {
				m.budget++
			}
		default:
			clear(data[begin:end])
		}
	})
	return nil
}

// Zero is Discard.
func (m *Memory) Zero(ctx context.Context, off, length int64) error {
	return m.Discard(ctx, off, length)
}

func (m *Memory) Extent(_ context.Context, off, length int64) (disk.Extent, error) {
	if err := m.check("extent", off, length); err != nil {
		return disk.Extent{}, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	e := disk.Extent{Data: m.pages[off/pageSize] != nil}
	for e.Length < length {
		page := (off + e.Length) / pageSize
		if (m.pages[page] != nil) != e.Data {
			break
		}
		e.Length = min(length, (page+1)*pageSize-off)
	}
	return e, nil
}

// each calls f for every page that the range touches: [begin, end) is the part of the page, at its
// offset in the range.
func (m *Memory) each(off, length int64, f func(page, begin, end, at int64)) {
	for at := int64(0); at < length; {
		page, begin := (off+at)/pageSize, (off+at)%pageSize
		end := min(pageSize, begin+length-at)
		f(page, begin, end, at)
		at += end - begin
	}
}

func (m *Memory) check(op string, off, length int64) error {
	if off < 0 || length < 0 || off > m.size-length || op == "extent" && length == 0 {
		return fmt.Errorf("%s of %d bytes at %d is outside of a disk of %d bytes", op, length, off,
			m.size)
	}
	return nil
}
