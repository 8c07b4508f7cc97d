package nbd

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"sort"
	"sync"

	"kubevirt.io/disk/disk"
)

// allocationContext says what an export stores. Only a disk with RemoteOptions.Once asks for it:
// nobody writes to such a disk meanwhile, so an answer stays right.
const allocationContext = "base:allocation"

// extents are the server's last answer about what the disk stores.
type extents struct {
	mu   sync.Mutex
	from int64    // guarded by mu; offset at which all begins
	all  []extent // guarded by mu; here length is the offset at which the extent ends
}

// Allocated describes the run at off, at most length bytes of it, as a disk.Extenter does. It waits
// for the server until ctx ends, and then returns disk.ErrNotNow. Without RemoteOptions.Once
// everything counts as data.
func (r *Remote) Allocated(ctx context.Context, off, length int64) (disk.Extent, error) {
	if !r.first.allocation {
		return disk.Extent{Length: length, Data: true}, nil
	}
	known := &r.extents
	known.mu.Lock()
	defer known.mu.Unlock()
	find := func() int {
		return sort.Search(len(known.all), func(i int) bool {
			return known.all[i].length > uint64(off)
		})
	}
	i := find()
	if off < known.from || i == len(known.all) {
		c := newCall(cmdBlockStatus, 0, uint64(off),
			uint64(min(r.Size()-off, math.MaxUint32/bestBlock*bestBlock)), nil)
		if err := r.call(ctx, c); err != nil {
			return disk.Extent{}, err
		}
		if c.extents == nil {
			return disk.Extent{}, r.explain(errors.New("the server describes nothing"))
		}
		end := uint64(off)
		for j := range c.extents {
			end += c.extents[j].length
			c.extents[j].length = end
		}
		known.from, known.all = off, c.extents
		i = find()
	}
	e := known.all[i]
	return disk.Extent{Length: min(length, int64(e.length)-off), Data: e.flags&stateZero == 0}, nil
}

// describe receives the payload of a chunk that describes extents, of length bytes.
func (l *link) describe(c *call, length int) error {
	p := make([]byte, length)
	if _, err := io.ReadFull(l.in, p); err != nil {
		return err
	}
	if binary.BigEndian.Uint32(p) != l.allocationID || c.extents != nil {
		return errors.New("the server describes what was not asked for")
	}
	for p = p[4:]; len(p) > 0; p = p[8:] {
		e := extent{uint64(binary.BigEndian.Uint32(p)), binary.BigEndian.Uint32(p[4:])}
		if e.length == 0 {
			return errors.New("the server describes an extent of no bytes")
		}
		c.extents = append(c.extents, e)
	}
	return nil
}
