package vhosttest

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Inflight is the region in which the back end notes what it has taken, so that it can go on after
// a restart. The front end keeps it meanwhile.
type Inflight struct {
	FD         int
	Size       uint64 // bytes
	Offset     uint64 // in the file
	Queues     uint16
	QueueSize  uint16
	Bytes      []byte // the region; a test may look, and lie
	file       []byte
	regionSize int // of a queue
}

const (
	inflightHeader = 16 // of a queue's region
	inflightState  = 16 // of a descriptor
)

func (f *Inflight) close() {
	if f.file != nil {
		_ = unix.Munmap(f.file)
	}
	_ = unix.Close(f.FD)
}

// payload is the inflight description.
func (f *Inflight) payload() []byte {
	b := U64(f.Size, f.Offset)
	b = binary.NativeEndian.AppendUint16(b, f.Queues)
	return binary.NativeEndian.AppendUint16(b, f.QueueSize)
}

// Inflight returns the region, or nil if there is none.
func (d *Driver) Inflight() *Inflight { return d.inflight }

// shareInflight gets a region from the back end at the first start, and gives it back at each.
func (d *Driver) shareInflight() error {
	if d.inflight == nil {
		f, err := d.getInflight()
		if err != nil {
			return err
		}
		d.inflight = f
	}
	return d.Conn().Tell(SetInflightFD, d.inflight.payload(), d.inflight.FD)
}

func (d *Driver) getInflight() (_ *Inflight, err error) {
	f := &Inflight{FD: -1, Queues: uint16(len(d.queues)), QueueSize: d.o.QueueSize}
	reply, err := d.Conn().Ask(GetInflightFD, f.payload())
	if err != nil {
		return nil, err
	}
	if len(reply.FDs) != 1 || len(reply.Payload) < 20 {
		closeAll(reply.FDs)
		return nil, fmt.Errorf("%w: GET_INFLIGHT_FD was answered with %d bytes and %d files",
			ErrViolation, len(reply.Payload), len(reply.FDs))
	}
	f.FD = reply.FDs[0]
	f.Size = binary.NativeEndian.Uint64(reply.Payload)
	f.Offset = binary.NativeEndian.Uint64(reply.Payload[8:])
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	f.regionSize = int(f.Size) / len(d.queues)
	if least := inflightHeader + inflightState*int(d.o.QueueSize); f.regionSize < least {
		return nil, fmt.Errorf("%w: a region of %d bytes for %d queues of %d", ErrViolation, f.Size,
			len(d.queues), d.o.QueueSize)
	}
	f.file, err = unix.Mmap(f.FD, 0, int(f.Offset+f.Size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("the inflight region: %w", err)
	}
	f.Bytes = f.file[f.Offset:]
	return f, nil
}

// Taken returns the heads of a queue that the region says the back end has. Each queue's region is
// taken to begin where an equal share of the whole does.
func (f *Inflight) Taken(queue int) (heads []uint16) {
	b := f.Bytes[queue*f.regionSize:]
	for i := range f.QueueSize {
		if b[inflightHeader+inflightState*int(i)] != 0 {
			heads = append(heads, i)
		}
	}
	return heads
}

// Reconnect goes on with a back end that has started again, as QEMU does: with the same features,
// memory, rings and inflight region. What the back end had taken and not given back is its to do
// again. What waits for requests goes on waiting meanwhile.
func (d *Driver) Reconnect(path string) error {
	_ = d.Conn().Close() // it may be closed
	if err := d.connect(path); err != nil {
		return err
	}
	return d.Start()
}
