package vhostuser

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/serving"
)

// The region of requests in flight, as QEMU's docs/interop/vhost-user describes it for split rings:
// for each ring a header, and behind it a state of each descriptor. The front end keeps it, and
// gives it to the next server of the ring, so that requests without an answer are executed again.
// The front end may have changed it, so its content is checked like a ring's.
const (
	inflightHeader  = 16
	inflightState   = 16
	inflightVersion = 1
	inflightAlign   = 64

	offFeatures  = 0
	offVersion   = 8
	offDescNum   = 10
	offLastBatch = 12
	offUsed      = 14

	stateInflight = 0
	stateNext     = 6
	stateCounter  = 8
)

// throughKept are kept in the region's features, of which the protocol defines none yet. The front
// end does not tell the next daemon what the guest has set, and the guest still relies on it.
const throughKept = throughOff | throughMaybe

// ofDisk are the bits that identify the disk of the region, and ofContent those for its content:
// see serving.Disk.Generation. The front end forgets the region when the guest starts again, so a
// guest whose front end still has the region goes on where it was.
const (
	ofDisk       = 1<<32 - 1
	ofContent    = throughMaybe - 1 - ofDisk
	firstContent = ofDisk + 1
)

// These refuse a guest that would write to one disk what it remembers of another, or of the disk's
// content before it was reverted.
var (
	errAnotherDisk = errors.New("the guest had another disk at this socket, which is gone: start " +
		"the guest again")
	errAnotherContent = errors.New("the disk was reverted to a snapshot while the guest was " +
		"away: start the guest again")
)

// inflightSize is how many bytes of the region are a ring's.
func inflightSize(num uint16) uint64 {
	n := uint64(inflightHeader) + inflightState*uint64(num)
	return (n + inflightAlign - 1) / inflightAlign * inflightAlign
}

// inflightRegion is the whole region, mapped.
type inflightRegion struct {
	all    []byte
	queues uint16
	num    uint16 // descriptors of each ring
}

// parseInflight parses a message's description of the region.
func parseInflight(b []byte) (size, off uint64, queues, num uint16, err error) {
	if len(b) < 20 {
		return 0, 0, 0, 0, fmt.Errorf("the region of requests in flight is described by %d bytes",
			len(b))
	}
	size, off = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
	queues, num = binary.LittleEndian.Uint16(b[16:]), binary.LittleEndian.Uint16(b[18:])
	if queues == 0 || queues > maxQueues || num == 0 || uint32(num) > maxRing {
		return 0, 0, 0, 0, fmt.Errorf("requests in flight of %d rings of %d descriptors", queues,
			num)
	}
	return size, off, queues, num, nil
}

// newInflight makes a region in a new file. The caller closes the descriptor.
func newInflight(queues, num uint16) (fd int, size uint64, err error) {
	size = inflightSize(num) * uint64(queues)
	fd, err = unix.MemfdCreate("vhost-user-inflight", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, 0, fmt.Errorf("memory for requests in flight: %w", err)
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS,
			unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, 0, fmt.Errorf("memory for requests in flight: %w", err)
	}
	return fd, size, nil
}

// openInflight maps a region.
func openInflight(fd int, size, off uint64, queues, num uint16) (*inflightRegion, error) {
	if need := inflightSize(num) * uint64(queues); size < need {
		return nil, fmt.Errorf("the region of requests in flight has %d bytes: %d rings of %d "+
			"descriptors need %d", size, queues, num, need)
	}
	all, err := mapShared(fd, size, off)
	if err != nil {
		return nil, fmt.Errorf("the region of requests in flight: %w", err)
	}
	return &inflightRegion{all, queues, num}, nil
}

// claim notes the disk and the content that the region is for. It refuses a region of another disk
// or content.
func (r *inflightRegion) claim(d *serving.Disk) error {
	n := binary.BigEndian.Uint64(d.Identity.NAA[:])
	mark := uint64(uint32(n>>32)^uint32(n)) | 1 // 0: an earlier version has not noted it
	if !r.note(ofDisk, mark) {
		return errAnotherDisk
	}
	if d.Store == nil && d.Remote == nil {
		return nil // the content has another name at each start
	}
	generation, err := d.Generation()
	if err != nil && atomic.LoadUint64(r.features())&ofContent != 0 {
		return err
	}
	if generation == "" {
		return nil
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(generation))
	if !r.note(ofContent, h.Sum64()&ofContent|firstContent) {
		return errAnotherContent
	}
	return nil
}

// note keeps a mark among the features, unless there is one. It reports whether the mark there is
// this one.
func (r *inflightRegion) note(where, mark uint64) bool {
	had := atomic.LoadUint64(r.features()) & where
	if had == 0 {
		atomic.OrUint64(r.features(), mark)
	}
	return had == 0 || had == mark
}

// adopt returns why the guest's writes are durable: by the region if it was used, and otherwise
// through.
func (r *inflightRegion) adopt(through uint64) (_ uint64, known bool) {
	if binary.LittleEndian.Uint16(r.all[offVersion:]) != 0 {
		return atomic.LoadUint64(r.features()), true
	}
	return through, false
}

// features are shared by the message loop and the goroutine that executes a flush.
func (r *inflightRegion) features() *uint64 {
	return (*uint64)(unsafe.Pointer(&r.all[offFeatures]))
}

// setWriteThrough notes why the guest's writes are durable.
func (r *inflightRegion) setWriteThrough(why uint64, on bool) {
	switch why &= throughKept; {
	case r == nil:
	case on:
		atomic.OrUint64(r.features(), why)
	default:
		atomic.AndUint64(r.features(), ^why)
	}
}

func (r *inflightRegion) close() {
	if r != nil {
		_ = unix.Munmap(r.all)
	}
}

// inflight is a ring's part of the region. nil notes nothing.
type inflight struct {
	b       []byte
	num     uint32
	counter uint64
}

// ringPart is the part of a ring with that many descriptors; nil: there is none.
func (r *inflightRegion) ringPart(index int, num uint32) *inflight {
	if r == nil || index >= int(r.queues) || num > uint32(r.num) {
		return nil
	}
	size := inflightSize(r.num)
	return &inflight{b: r.all[uint64(index)*size : uint64(index+1)*size : uint64(index+1)*size],
		num: num}
}

func (f *inflight) state(head uint16) []byte {
	at := inflightHeader + inflightState*int(head)
	return f.b[at : at+inflightState]
}

// setFlag marks a descriptor, in order with the ring's indexes.
func (f *inflight) setFlag(head uint16, on uint8) {
	s := f.state(head)
	word := (*uint32)(unsafe.Pointer(&s[stateInflight]))
	atomic.StoreUint32(word, uint32(on)) // the three bytes behind it are padding
}

// noteTaken notes that a request is in flight. It is called before the request is executed.
func (f *inflight) noteTaken(head uint16) {
	if f == nil {
		return
	}
	f.counter++
	binary.LittleEndian.PutUint64(f.state(head)[stateCounter:], f.counter)
	f.setFlag(head, 1)
}

// notePutting notes that a request is about to be shown as used, as the only one of its batch.
func (f *inflight) notePutting(head uint16) {
	if f == nil {
		return
	}
	copy(f.state(head)[stateNext:stateNext+2], f.b[offLastBatch:])
	binary.LittleEndian.PutUint16(f.b[offLastBatch:], head)
}

// notePut notes that the request was shown as used.
func (f *inflight) notePut(head, used uint16) {
	if f == nil {
		return
	}
	f.setFlag(head, 0)
	binary.LittleEndian.PutUint16(f.b[offUsed:], used)
}

// clear forgets all requests: their driver has started again.
func (f *inflight) clear() {
	if f != nil {
		clear(f.b[offVersion:])
	}
}

// hasRequests reports whether a request is in flight.
func (f *inflight) hasRequests() bool {
	for head := range uint16(f.num) {
		if f.state(head)[stateInflight] != 0 {
			return true
		}
	}
	return false
}

// resume returns the requests that a ring had in flight, in the order in which they came. used is
// the ring's used index. A new region gets its header.
func (f *inflight) resume(used uint16) (heads []uint16, err error) {
	if f == nil {
		return nil, nil
	}
	if binary.LittleEndian.Uint16(f.b[offVersion:]) == 0 { // the region is new
		binary.LittleEndian.PutUint16(f.b[offVersion:], inflightVersion)
		binary.LittleEndian.PutUint16(f.b[offDescNum:], uint16(f.num))
		binary.LittleEndian.PutUint16(f.b[offUsed:], used)
		return nil, nil
	}
	if v := binary.LittleEndian.Uint16(f.b[offVersion:]); v != inflightVersion {
		return nil, fmt.Errorf("the region of requests in flight has version %d, and only %d is "+
			"known here", v, inflightVersion)
	}
	// A daemon that was killed may have shown its last batch to the driver, and not noted that.
	missing := used - binary.LittleEndian.Uint16(f.b[offUsed:])
	if uint32(missing) > f.num && !f.hasRequests() {
		missing = 0 // its driver has started again: a ring that stops has given everything back
	}
	if uint32(missing) > f.num {
		return nil, fmt.Errorf("the region of requests in flight lags by %d requests in a ring of "+
			"%d", missing, f.num)
	}
	for head := binary.LittleEndian.Uint16(f.b[offLastBatch:]); missing > 0; missing-- {
		if uint32(head) >= f.num {
			return nil, errHead
		}
		f.setFlag(head, 0)
		head = binary.LittleEndian.Uint16(f.state(head)[stateNext:])
	}
	binary.LittleEndian.PutUint16(f.b[offUsed:], used)
	type flying struct {
		head    uint16
		counter uint64
	}
	var all []flying
	for head := range uint16(f.num) {
		s := f.state(head)
		if s[stateInflight] != 0 {
			counter := binary.LittleEndian.Uint64(s[stateCounter:])
			all = append(all, flying{head, counter})
			f.counter = max(f.counter, counter)
		}
	}
	slices.SortFunc(all, func(a, b flying) int { return cmp.Compare(a.counter, b.counter) })
	for _, one := range all {
		heads = append(heads, one.head)
	}
	return heads, nil
}
