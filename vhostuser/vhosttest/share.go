package vhosttest

import (
	"encoding/binary"
	"fmt"
)

// ShareMemory gives all of the guest's memory to the back end: region by region if it can be
// plugged in, otherwise at once.
func (d *Driver) ShareMemory() error {
	if d.Protocol&ProtocolMemSlots == 0 {
		return d.SetMemTable()
	}
	for _, r := range d.Memory.Regions() {
		if err := d.Conn().Tell(AddMemReg, d.slot(r), r.FD); err != nil {
			return err
		}
	}
	return nil
}

// slot describes a region in a message of its own.
func (d *Driver) slot(r *Region) []byte { return append(U64(0), r.payload()...) }

// SetMemTable gives all of the guest's memory to the back end at once, in place of what it had.
func (d *Driver) SetMemTable() error {
	regions := d.Memory.Regions()
	payload := U32(uint32(len(regions)), 0)
	var fds []int
	for _, r := range regions {
		payload, fds = append(payload, r.payload()...), append(fds, r.FD)
	}
	return d.Conn().Tell(SetMemTable, payload, fds...)
}

// AddRegion plugs memory in.
func (d *Driver) AddRegion(o RegionOptions) (*Region, error) {
	r, err := newRegion(o)
	if err != nil {
		return nil, err
	}
	d.Memory.add(r)
	if d.Protocol&ProtocolMemSlots != 0 {
		err = d.Conn().Tell(AddMemReg, d.slot(r), r.FD)
	} else {
		err = d.SetMemTable()
	}
	if err != nil {
		d.Memory.remove(r)
		r.close()
		return nil, err
	}
	return r, nil
}

// RemoveRegion takes memory away. The caller knows that no ring and no request lies there. The
// memory of this process stays until the back end has answered.
func (d *Driver) RemoveRegion(r *Region) error {
	d.Memory.remove(r)
	var err error
	if d.Protocol&ProtocolMemSlots != 0 {
		err = d.Conn().Tell(RemMemReg, d.slot(r))
	} else {
		err = d.SetMemTable()
	}
	r.close()
	return err
}

// Config is the configuration of a block device (virtio 1.2, section 5.2.4). Sectors have 512
// bytes, whatever the block size is.
type Config struct {
	Capacity         uint64 // sectors
	SizeMax, SegMax  uint32 // bytes of a descriptor, and descriptors of a request
	BlockSize        uint32 // bytes
	PhysicalExponent uint8  // a physical block is 2 to the power of this many blocks
	AlignmentOffset  uint8  // blocks
	MinIO            uint16 // blocks
	OptIO            uint32 // blocks
	WriteBack        bool   // the write cache is on
	Queues           uint16

	MaxDiscardSectors     uint32
	MaxDiscardRanges      uint32
	DiscardAlignment      uint32 // sectors
	MaxWriteZeroesSectors uint32
	MaxWriteZeroesRanges  uint32
	WriteZeroesMayUnmap   bool
}

// configLen is how much QEMU asks for at least: all up to write_zeroes_may_unmap.
const configLen = 60

// writeCacheOffset is where the only field is that a driver may write.
const writeCacheOffset = 32

// ConfigBytes asks for a piece of the configuration. A back end that refuses answers with none.
func (d *Driver) ConfigBytes(offset, bytes uint32) ([]byte, error) {
	if d.Protocol&ProtocolConfig == 0 {
		return nil, fmt.Errorf("GET_CONFIG: %w", ErrUnsupported)
	}
	reply, err := d.Conn().Ask(GetConfig, append(U32(offset, bytes, 0), make([]byte, bytes)...))
	if err != nil {
		return nil, err
	}
	closeAll(reply.FDs)
	if len(reply.Payload) == 0 {
		return nil, &RefusedError{Request: GetConfig}
	}
	if len(reply.Payload) != 12+int(bytes) {
		return nil, fmt.Errorf("%w: GET_CONFIG of %d bytes was answered with %d", ErrViolation,
			bytes, len(reply.Payload))
	}
	return reply.Payload[12:], nil
}

// Config asks for the configuration. A guest sees those fields only whose features it has.
func (d *Driver) Config() (c Config, err error) {
	b, err := d.ConfigBytes(0, configLen)
	if err != nil {
		return c, err
	}
	le := binary.LittleEndian
	return Config{Capacity: le.Uint64(b), SizeMax: le.Uint32(b[8:]), SegMax: le.Uint32(b[12:]),
		BlockSize: le.Uint32(b[20:]), PhysicalExponent: b[24], AlignmentOffset: b[25],
		MinIO: le.Uint16(b[26:]), OptIO: le.Uint32(b[28:]), WriteBack: b[writeCacheOffset] != 0,
		Queues: le.Uint16(b[34:]), MaxDiscardSectors: le.Uint32(b[36:]),
		MaxDiscardRanges: le.Uint32(b[40:]), DiscardAlignment: le.Uint32(b[44:]),
		MaxWriteZeroesSectors: le.Uint32(b[48:]), MaxWriteZeroesRanges: le.Uint32(b[52:]),
		WriteZeroesMayUnmap: b[56] != 0}, nil
}

// SetConfig writes a piece of the configuration.
func (d *Driver) SetConfig(offset uint32, data []byte) error {
	if d.Protocol&ProtocolConfig == 0 {
		return fmt.Errorf("SET_CONFIG: %w", ErrUnsupported)
	}
	return d.Conn().Tell(SetConfig, append(U32(offset, uint32(len(data)), 0), data...))
}

// SetWriteCache turns the write cache on or off.
func (d *Driver) SetWriteCache(on bool) error {
	value := []byte{0}
	if on {
		value[0] = 1
	}
	return d.SetConfig(writeCacheOffset, value)
}
