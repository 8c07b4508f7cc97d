package vhosttest

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// RegionOptions describe a part of the guest's memory. Each has a memfd of its own.
type RegionOptions struct {
	Addr     uint64 // where the guest has it
	Size     uint64 // bytes, a multiple of the page size
	Offset   uint64 // where it begins in its file, a multiple of the page size
	Unsealed bool   // without the seals that keep a file from being cut short; QEMU sets them
}

// Region is a part of the guest's memory.
type Region struct {
	RegionOptions
	User  uint64 // its address in this process: what rings are named by
	FD    int    // its memfd
	Bytes []byte // the guest's view

	file []byte // what is mapped, from the beginning of the file
	free []span // in order; guarded by Memory.mu
}

// Buffer is a piece of the guest's memory.
type Buffer struct {
	Addr  uint64 // in the guest
	Bytes []byte
}

// newRegion makes the memory of a region. Nobody else has it yet.
func newRegion(o RegionOptions) (_ *Region, err error) {
	fd, err := unix.MemfdCreate("vhosttest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory for the guest: %w", err)
	}
	r := &Region{RegionOptions: o, FD: fd}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if err := unix.Ftruncate(fd, int64(o.Offset+o.Size)); err != nil {
		return nil, fmt.Errorf("memory for the guest: %w", err)
	}
	if !o.Unsealed {
		const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			return nil, fmt.Errorf("memory for the guest: seals: %w", err)
		}
	}
	r.file, err = unix.Mmap(fd, 0, int(o.Offset+o.Size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("memory for the guest: %w", err)
	}
	r.Bytes = r.file[o.Offset:]
	r.User = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(r.Bytes))))
	return r, nil
}

func (r *Region) close() {
	if r.file != nil {
		_ = unix.Munmap(r.file)
	}
	_ = unix.Close(r.FD)
}

// Truncate changes the length of an unsealed region's file. After that nobody may touch what is
// beyond it, not even this process, which would get SIGBUS.
func (r *Region) Truncate(bytes uint64) error {
	return unix.Ftruncate(r.FD, int64(r.Offset+bytes))
}

// payload describes the region in a message.
func (r *Region) payload() []byte {
	return U64(r.Addr, r.Size, r.User, r.Offset)
}

// span is a free part of a region: from and to in bytes.
type span struct{ from, to uint64 }

// Memory is the memory of a guest: its regions, and which parts are free.
type Memory struct {
	mu      sync.Mutex
	regions []*Region
}

// add takes a region in.
func (m *Memory) add(r *Region) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r.free = []span{{0, r.Size}}
	m.regions = append(m.regions, r)
}

// remove takes a region out.
func (m *Memory) remove(r *Region) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.regions = slices.DeleteFunc(m.regions, func(x *Region) bool { return x == r })
}

// Regions are the regions of the guest.
func (m *Memory) Regions() []*Region {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.regions)
}

// Alloc finds room for some bytes of data, whose address is a multiple of 512.
func (m *Memory) Alloc(bytes int) (Buffer, error) { return m.alloc(nil, bytes, 512) }

// AllocIn is Alloc in a region.
func (m *Memory) AllocIn(r *Region, bytes int) (Buffer, error) { return m.alloc(r, bytes, 512) }

// alloc finds room in a region, or in any. What is allocated is a multiple of 16 bytes, so that
// whatever is free begins at one.
func (m *Memory) alloc(in *Region, bytes, align int) (Buffer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.regions {
		if in != nil && r != in {
			continue
		}
		if from, ok := r.take(room(bytes), uint64(align)); ok {
			return Buffer{r.Addr + from, r.Bytes[from : from+uint64(bytes)]}, nil
		}
	}
	return Buffer{}, fmt.Errorf("the guest has no memory left for %d bytes", bytes)
}

// room is what so many bytes take.
func room(bytes int) uint64 { return (max(uint64(bytes), 1) + 15) &^ 15 }

// take finds a free part.
func (r *Region) take(length, align uint64) (from uint64, ok bool) {
	for i, s := range r.free {
		from := (s.from + align - 1) &^ (align - 1)
		if from > s.to || s.to-from < length {
			continue
		}
		var rest []span
		if s.from < from {
			rest = append(rest, span{s.from, from})
		}
		if from+length < s.to {
			rest = append(rest, span{from + length, s.to})
		}
		r.free = slices.Replace(r.free, i, i+1, rest...)
		return from, true
	}
	return 0, false
}

// give makes a part free again.
func (r *Region) give(s span) {
	at := slices.IndexFunc(r.free, func(x span) bool { return x.from >= s.to })
	if at < 0 {
		at = len(r.free)
	}
	if at < len(r.free) && r.free[at].from == s.to {
		s.to = r.free[at].to
		r.free = slices.Delete(r.free, at, at+1)
	}
	if at > 0 && r.free[at-1].to == s.from {
		r.free[at-1].to = s.to
		return
	}
	r.free = slices.Insert(r.free, at, s)
}

// Free gives back what Alloc found. The regions may be gone.
func (m *Memory) Free(buffers ...Buffer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range buffers {
		for _, r := range m.regions {
			if r.has(b.Addr) {
				r.give(span{b.Addr - r.Addr, b.Addr - r.Addr + room(len(b.Bytes))})
			}
		}
	}
}

func (r *Region) has(addr uint64) bool {
	return addr >= r.Addr && addr-r.Addr < r.Size
}

// At returns the bytes at an address of the guest, all within one region.
func (m *Memory) At(addr uint64, bytes int) ([]byte, error) {
	for _, r := range m.Regions() {
		if r.has(addr) && uint64(bytes) <= r.Size-(addr-r.Addr) {
			return r.Bytes[addr-r.Addr:][:bytes:bytes], nil
		}
	}
	return nil, fmt.Errorf("the guest has no %d bytes at %#x", bytes, addr)
}

// user is the address in this process of what is at an address of the guest.
func user(b Buffer) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b.Bytes))))
}
