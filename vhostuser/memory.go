package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// maxRegions is the most memory regions of a front end: as many as QEMU has slots.
	maxRegions = 32
	// maxTableRegions is the most regions in a SET_MEM_TABLE.
	maxTableRegions = 8
	regionSize      = 32
	// maxMemory is the most memory of a guest, and maxMapped of all guests. An address space has
	// 128 TiB, and a file without content may claim all of it. Bytes.
	maxMemory = 8 << 40
	maxMapped = 64 << 40
)

var errMemory = fmt.Errorf("a guest has more than %d TiB of memory", maxMemory>>40)

// mapped is how much memory guests have now.
var mapped atomic.Int64

// region is a part of the guest's memory, mapped here. Addresses and sizes are bytes.
type region struct {
	guest  uint64 // guest physical address
	size   uint64
	user   uint64 // address in the front end, as used for ring addresses
	offset uint64 // where the region begins in its file
	// sealed says that nobody can cut the file short, so that an access cannot fault
	sealed  bool
	mapping *mapping
}

// mapping is the memory of a region. Several tables may have it.
type mapping struct {
	refs atomic.Int32
	all  []byte // from the file's begin
}

func (m *mapping) release() {
	if m.refs.Add(-1) == 0 {
		mapped.Add(-int64(len(m.all)))
		_ = unix.Munmap(m.all)
	}
}

// bytes is the memory of the region.
func (r *region) bytes() []byte { return r.mapping.all[r.offset : r.offset+r.size] }

// table is the memory of a guest. It never changes; the front end sets a new one. Requests keep the
// table that they began with.
type table struct {
	refs    atomic.Int64 // of the connection, its queues, and requests
	regions []region     // ascending by guest address, without overlap
	sealed  bool         // all regions are sealed
}

// newTable makes a table. It owns the mappings then.
func newTable(regions []region) (*table, error) {
	t := &table{regions: regions, sealed: true}
	t.refs.Store(1)
	slices.SortFunc(t.regions, func(a, b region) int {
		if a.guest < b.guest {
			return -1
		}
		return 1
	})
	total := 0
	for i := range t.regions {
		r := &t.regions[i]
		t.sealed = t.sealed && r.sealed
		if total += len(r.mapping.all); total > maxMemory {
			t.release()
			return nil, errMemory
		}
		if i > 0 && t.regions[i-1].guest+t.regions[i-1].size > r.guest {
			t.release()
			return nil, errors.New("two regions of the guest's memory overlap")
		}
	}
	return t, nil
}

func (t *table) release() {
	if t != nil && t.refs.Add(-1) == 0 {
		for i := range t.regions {
			t.regions[i].mapping.release()
		}
	}
}

// at returns the memory at a guest address, at most length bytes: the rest may be in the next
// region. nil: there is none.
func (t *table) at(addr, length uint64) []byte {
	for i := range t.regions {
		r := &t.regions[i]
		if off := addr - r.guest; addr >= r.guest && off < r.size {
			n := min(length, r.size-off)
			return r.bytes()[off : off+n : off+n]
		}
	}
	return nil
}

// atUser returns the length bytes at an address of the front end, and their guest address, or an
// error.
func (t *table) atUser(addr, length uint64) ([]byte, uint64, error) {
	for i := range t.regions {
		r := &t.regions[i]
		if off := addr - r.user; addr >= r.user && off < r.size {
			if length > r.size-off {
				break
			}
			return r.bytes()[off : off+length : off+length], r.guest + off, nil
		}
	}
	return nil, 0, fmt.Errorf("%d bytes at %#x are not in the guest's memory", length, addr)
}

// parseRegion reads the description of a region.
func parseRegion(b []byte) region {
	return region{guest: binary.LittleEndian.Uint64(b), size: binary.LittleEndian.Uint64(b[8:]),
		user: binary.LittleEndian.Uint64(b[16:]), offset: binary.LittleEndian.Uint64(b[24:])}
}

// pagesOf checks that a file that a front end shares is in memory, and has end bytes at least. A
// thread that waits for a page of another file cannot be stopped, and Go's garbage collector would
// wait for it. It returns the size of huge pages; 0: the file has none.
func pagesOf(fd int, end uint64) (huge uint64, err error) {
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := errors.Join(unix.Fstatfs(fd, &fs), unix.Fstat(fd, &st)); err != nil {
		return 0, err
	}
	switch fs.Type {
	case unix.TMPFS_MAGIC:
	case unix.HUGETLBFS_MAGIC:
		huge = uint64(max(st.Blksize, 1))
	default:
		return 0, errors.New("the file is not in memory: use memfd, /dev/shm or huge pages")
	}
	if end > uint64(st.Size) {
		return 0, fmt.Errorf("the file ends at %d, and what is shared at %d", st.Size, end)
	}
	return huge, nil
}

func (r *region) mapFile(fd int) error {
	if fd < 0 {
		return errors.New("a region of the guest's memory has no descriptor")
	}
	if r.size == 0 || r.size > math.MaxInt64-r.offset || r.guest+r.size < r.guest ||
		r.user+r.size < r.user || r.offset > math.MaxInt64 {
		return fmt.Errorf("a region of the guest's memory has %d bytes at %#x: that cannot be",
			r.size, r.guest)
	}
	// Look at the size after the seals: an unsealed file could become shorter in between.
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	sealed := err == nil && seals&unix.F_SEAL_SHRINK != 0
	page, err := pagesOf(fd, r.offset+r.size)
	if err != nil {
		return fmt.Errorf("the guest's memory: %w", err)
	}
	length := r.offset + r.size
	if page > 0 { // mappings of huge pages are whole pages
		length = (length + page - 1) / page * page
	}
	if length > maxMemory {
		return errMemory
	}
	if mapped.Add(int64(length)) > maxMapped {
		mapped.Add(-int64(length))
		return fmt.Errorf("all guests would have more than %d TiB of memory", maxMapped>>40)
	}
	all, err := unix.Mmap(fd, 0, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		mapped.Add(-int64(length))
		return fmt.Errorf("the guest's memory cannot be mapped: %w", err)
	}
	_ = unix.Madvise(all, unix.MADV_DONTDUMP) // a guest's memory must not be in core files
	// An access to a hole in huge pages faults when there are no more of them, even if sealed.
	r.sealed = sealed && page == 0
	r.mapping = &mapping{all: all}
	r.mapping.refs.Store(1)
	return nil
}

// withRegion is a table with one more region.
func (t *table) withRegion(r region) (*table, error) {
	if t != nil && len(t.regions) >= maxRegions {
		r.mapping.release()
		return nil, fmt.Errorf("the guest's memory has more than %d regions", maxRegions)
	}
	return newTable(append(t.kept(func(*region) bool { return true }), r))
}

func (t *table) withoutRegion(gone region) (*table, error) {
	regions := t.kept(func(r *region) bool {
		return r.guest != gone.guest || r.size != gone.size || r.user != gone.user
	})
	if t == nil || len(regions) == len(t.regions) {
		for i := range regions {
			regions[i].mapping.release()
		}
		return nil, fmt.Errorf("the guest's memory has no region of %d bytes at %#x to remove",
			gone.size, gone.guest)
	}
	return newTable(regions)
}

// kept returns the regions for which which returns true, with a reference to each mapping.
func (t *table) kept(which func(*region) bool) (all []region) {
	if t == nil {
		return nil
	}
	for i := range t.regions {
		if r := &t.regions[i]; which(r) {
			r.mapping.refs.Add(1)
			all = append(all, *r)
		}
	}
	return all
}

// setMemory changes the guest's memory. The rings that run move to the new table.
func (c *conn) setMemory(m *message) error {
	t, err := c.newMemory(m)
	if err != nil {
		return err
	}
	if !t.sealed && !c.toldMemory {
		c.toldMemory = true
		c.log().Info("the guest's memory can be cut short by who shares it, or lies in huge " +
			"pages, so its data is copied: seal it (F_SEAL_SHRINK), as QEMU does with memfd")
	}
	c.table.release()
	c.table = t
	for _, q := range c.queues {
		if q != nil {
			if err := q.remap(t); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *conn) newMemory(m *message) (*table, error) {
	if m.request != reqSetMemTable {
		if len(m.payload) != 8+regionSize {
			return nil, m.wrongSize()
		}
		r := parseRegion(m.payload[8:])
		if m.request == reqRemMemReg {
			return c.table.withoutRegion(r)
		}
		fd := m.take(0)
		defer closeFD(fd)
		if err := r.mapFile(fd); err != nil {
			return nil, err
		}
		return c.table.withRegion(r)
	}
	if len(m.payload) < 8 {
		return nil, m.wrongSize()
	}
	n := int(binary.LittleEndian.Uint32(m.payload))
	if n > maxTableRegions || len(m.payload) != 8+n*regionSize || len(m.fds) != n {
		return nil, fmt.Errorf("a table of %d regions of memory has %d bytes and %d descriptors",
			n, len(m.payload), len(m.fds))
	}
	var regions []region
	for i := range n {
		r := parseRegion(m.payload[8+i*regionSize:])
		if err := r.mapFile(m.fds[i]); err != nil {
			for _, r := range regions {
				r.mapping.release()
			}
			return nil, err
		}
		regions = append(regions, r)
	}
	return newTable(regions)
}
