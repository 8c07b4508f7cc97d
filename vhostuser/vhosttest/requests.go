package vhosttest

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Type is the type of a request (virtio 1.2, section 5.2.6).
type Type uint32

// Types of requests.
const (
	TypeRead        Type = 0  // VIRTIO_BLK_T_IN
	TypeWrite       Type = 1  // VIRTIO_BLK_T_OUT
	TypeFlush       Type = 4  // VIRTIO_BLK_T_FLUSH
	TypeGetID       Type = 8  // VIRTIO_BLK_T_GET_ID
	TypeDiscard     Type = 11 // VIRTIO_BLK_T_DISCARD
	TypeWriteZeroes Type = 13 // VIRTIO_BLK_T_WRITE_ZEROES
)

func (t Type) String() string {
	names := map[Type]string{TypeRead: "read", TypeWrite: "write", TypeFlush: "flush",
		TypeGetID: "get ID", TypeDiscard: "discard", TypeWriteZeroes: "write zeroes"}
	if name, ok := names[t]; ok {
		return name
	}
	return fmt.Sprintf("type %d", uint32(t))
}

// Status of a request.
const (
	StatusOK          byte = 0
	StatusIOErr       byte = 1
	StatusUnsupported byte = 2
	statusNone        byte = 0xff // the device wrote nothing
)

// StatusError says that the device ended a request with an error.
type StatusError struct {
	Type   Type
	Sector uint64
	Status byte
}

func (e *StatusError) Error() string {
	what := fmt.Sprintf("status %d", e.Status)
	switch e.Status {
	case StatusIOErr:
		what = "IOERR"
	case StatusUnsupported:
		what = "UNSUPP"
	}
	return fmt.Sprintf("%v at sector %d: %s", e.Type, e.Sector, what)
}

const (
	sectorSize = 512
	requestLen = 16 // the header of a request
	idLen      = 20

	unmapOfZero = 1
)

// Layout is how a request is cut into descriptors. The device must take any (virtio 1.2, section
// 2.7.4). The zero value is what Linux does: header, data, status.
type Layout struct {
	Indirect   bool
	Header     []int // bytes of its descriptors; nil: one
	Data       []int // bytes of its descriptors, the last again and again; nil: one
	JoinHeader bool  // header and data of a write share descriptors, cut as Data says
	JoinStatus bool  // data of a read and the status share descriptors, cut as Data says
	Regions    bool  // each descriptor of data lies in another region, in turn
}

// Command is one request. The sector is sent as it is, and so is the data.
type Command struct {
	Type   Type
	Sector uint64
	Out    []byte // data for the device
	In     int    // bytes of data from the device
	Layout *Layout
}

// Ticket is a command that the device has.
type Ticket struct {
	*Pending
	c  Command
	in []Buffer // where the data goes; the last byte is the status
}

// Begin gives a command to the device and does not wait.
func (d *Driver) Begin(queue int, c Command) (*Ticket, error) {
	t, err := d.Prepare(queue, c)
	if err != nil {
		return nil, err
	}
	return t, d.queues[queue].Publish()
}

// Prepare puts a command into the ring. Queue.Publish shows it to the device.
func (d *Driver) Prepare(queue int, c Command) (_ *Ticket, err error) {
	defer guard(&err)()
	l := d.o.Layout
	if c.Layout != nil {
		l = *c.Layout
	}
	b := builder{m: &d.Memory, regions: l.Regions}
	header := binary.LittleEndian.AppendUint32(nil, uint32(c.Type))
	header = binary.LittleEndian.AppendUint32(header, 0)
	header = binary.LittleEndian.AppendUint64(header, c.Sector)
	if l.JoinHeader {
		b.out(append(header, c.Out...), l.Data)
	} else {
		b.out(header, l.Header)
		b.out(c.Out, l.Data)
	}
	if l.JoinStatus {
		b.in(c.In+1, l.Data)
	} else {
		b.in(c.In, l.Data)
		b.in(1, nil)
	}
	if b.err != nil {
		d.Memory.Free(b.all...)
		return nil, b.err
	}
	last := b.inside[len(b.inside)-1].Bytes
	last[len(last)-1] = statusNone
	t := &Ticket{c: c, in: b.inside}
	if t.Pending, err = d.queues[queue].Add(b.parts, l.Indirect); err != nil {
		d.Memory.Free(b.all...)
		return nil, err
	}
	t.buffers = append(t.buffers, b.all...)
	return t, nil
}

// builder cuts a command into parts.
type builder struct {
	m           *Memory
	regions     bool
	parts       []Part
	all, inside []Buffer
	err         error
}

// piece adds one part.
func (b *builder) piece(bytes int, write bool) Buffer {
	var in *Region
	if b.regions {
		all := b.m.Regions()
		in = all[len(b.parts)%len(all)]
	}
	x, err := b.m.AllocIn(in, bytes)
	if err != nil {
		b.err = err
		return Buffer{}
	}
	b.all = append(b.all, x)
	b.parts = append(b.parts, Part{Addr: x.Addr, Len: uint32(bytes), Write: write})
	return x
}

// cut calls do for each piece of so many bytes.
func cut(bytes int, lengths []int, do func(from, to int)) {
	for from, i := 0, 0; from < bytes; i++ {
		to := bytes
		if len(lengths) > 0 {
			to = min(bytes, from+max(1, lengths[min(i, len(lengths)-1)]))
		}
		do(from, to)
		from = to
	}
}

func (b *builder) out(data []byte, lengths []int) {
	cut(len(data), lengths, func(from, to int) {
		if b.err == nil {
			copy(b.piece(to-from, false).Bytes, data[from:to])
		}
	})
}

func (b *builder) in(bytes int, lengths []int) {
	cut(bytes, lengths, func(from, to int) {
		if b.err == nil {
			b.inside = append(b.inside, b.piece(to-from, true))
		}
	})
}

// Wait waits until the device has ended the command, and returns the data. It is called once. An
// error of the device is a *StatusError; the data came all the same.
func (t *Ticket) Wait() (data []byte, err error) {
	defer guard(&err)()
	written, err := t.Pending.Wait()
	if err != nil {
		return nil, err // the device may still write, so the buffers are lost
	}
	m := &t.q.d.Memory
	for _, b := range t.in {
		// The guest may have moved meanwhile: the memory is where the address says.
		now, err := m.At(b.Addr, len(b.Bytes))
		if err != nil {
			return nil, err
		}
		data = append(data, now...)
	}
	status := data[len(data)-1]
	data = data[:t.c.In]
	m.Free(t.buffers...)
	switch {
	case status == statusNone:
		return data, fmt.Errorf("%w: %v at sector %d ended without a status", ErrViolation,
			t.c.Type, t.c.Sector)
	case status != StatusOK:
		return data, &StatusError{t.c.Type, t.c.Sector, status}
	case written != 0 && int(written) != t.c.In+1:
		// Linux does not look at it, but virtio 1.2, section 2.7.8.2, wants it.
		return data, fmt.Errorf("%w: %v at sector %d wrote %d bytes, not %d", ErrViolation,
			t.c.Type, t.c.Sector, written, t.c.In+1)
	}
	return data, nil
}

// Do gives a command to the device and waits.
func (d *Driver) Do(queue int, c Command) ([]byte, error) {
	t, err := d.Begin(queue, c)
	if err != nil {
		return nil, err
	}
	return t.Wait()
}

// sectors turns an offset in bytes into sectors.
func sectors(what string, offset int64, bytes int) (uint64, error) {
	if offset < 0 || offset%sectorSize != 0 || bytes%sectorSize != 0 {
		return 0, fmt.Errorf("%s of %d bytes at %d: not in sectors of %d bytes", what, bytes,
			offset, sectorSize)
	}
	return uint64(offset) / sectorSize, nil
}

// Read reads from an offset in bytes.
func (d *Driver) Read(queue int, offset int64, p []byte) error {
	sector, err := sectors("a read", offset, len(p))
	if err != nil {
		return err
	}
	data, err := d.Do(queue, Command{Type: TypeRead, Sector: sector, In: len(p)})
	copy(p, data)
	return err
}

// Write writes at an offset in bytes.
func (d *Driver) Write(queue int, offset int64, p []byte) error {
	sector, err := sectors("a write", offset, len(p))
	if err != nil {
		return err
	}
	_, err = d.Do(queue, Command{Type: TypeWrite, Sector: sector, Out: p})
	return err
}

// Flush makes durable what was written.
func (d *Driver) Flush(queue int) error {
	_, err := d.Do(queue, Command{Type: TypeFlush})
	return err
}

// ID returns the serial number.
func (d *Driver) ID(queue int) (string, error) {
	b, err := d.Do(queue, Command{Type: TypeGetID, In: idLen})
	id, _, _ := bytes.Cut(b, []byte{0})
	return string(id), err
}

// Range is a part of the disk, in sectors.
type Range struct {
	Sector uint64
	Count  uint32
	Unmap  bool // zeroes need not keep their room
	Flags  uint32
}

// Ranges is the data of a request to discard or to write zeroes.
func Ranges(all ...Range) (b []byte) {
	for _, r := range all {
		flags := r.Flags
		if r.Unmap {
			flags |= unmapOfZero
		}
		b = binary.LittleEndian.AppendUint64(b, r.Sector)
		b = binary.LittleEndian.AppendUint32(b, r.Count)
		b = binary.LittleEndian.AppendUint32(b, flags)
	}
	return b
}

// Discard gives up ranges.
func (d *Driver) Discard(queue int, all ...Range) error {
	_, err := d.Do(queue, Command{Type: TypeDiscard, Out: Ranges(all...)})
	return err
}

// WriteZeroes writes zeroes to ranges.
func (d *Driver) WriteZeroes(queue int, all ...Range) error {
	_, err := d.Do(queue, Command{Type: TypeWriteZeroes, Out: Ranges(all...)})
	return err
}
