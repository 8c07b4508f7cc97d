package unpack

import (
	"bufio"
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"kubevirt.io/disk/disk/foreign"
)

// The stream-optimised form of VMDK is in appliances (OVA): a header, tables, and grains of the
// disk in zlib, each behind a marker with the number of the grain. It can be read from its
// beginning to its end (VMware, "Virtual Disk Format 5.0", "Stream-Optimized Compressed Sparse
// Extents"). All numbers are little-endian:
//
//	header   0 "KDMV"  4 version  8 flags  12 capacity  20 sectors of a grain  28 descriptor
//	         36 its sectors  44 entries of a grain table  56 grain directory  64 where grains begin
//	         77 compression
//	marker   0 first sector of the grain  8 bytes of its data  12 the data; up to the next sector
//	         0 sectors that follow        8 zero               12 what they are
const (
	vmdkSector  = 512
	vmdkMagic   = "KDMV"
	vmdkDeflate = 1
	// vmdkStream are the flags of this form: grains are compressed, and have markers.
	vmdkStream = 1<<16 | 1<<17
	vmdkAtEnd  = 1<<64 - 1 // the grain directory comes behind the grains
	vmdkTable  = 512       // entries of a grain table

	// vmdkRoom, and vmdkRoomGrain for each grain, limit the bytes before the first grain, and also
	// the tables after it: to more than twice the size of all tables. Compressed, that can be a few
	// bytes, and reading it cannot be interrupted. Bytes.
	vmdkRoom      = 64 << 20
	vmdkRoomGrain = 16

	vmdkEnd    = 0 // kinds of markers
	vmdkGT     = 1
	vmdkGD     = 2
	vmdkFooter = 3
)

// isVMDKStream reports whether data begins like a stream-optimised VMDK image.
func isVMDKStream(head []byte) bool {
	return len(head) >= vmdkSector && string(head[:4]) == vmdkMagic &&
		binary.LittleEndian.Uint32(head[8:])&vmdkStream == vmdkStream
}

// vmdkReader reads the disk in such an image.
type vmdkReader struct {
	in  *bufio.Reader
	pos int64 // in the image

	begun    bool
	ended    bool // the image was read to its end
	head     foreign.VMDKHeader
	capacity int64 // of the disk, bytes
	grain    int64 // bytes
	atEnd    bool  // the tables follow the grains, and an end marker follows the tables
	room     int64 // bytes that tables behind the first grain may still take
	tables   int64 // number of grains in the tables before the grains
	grains   int64 // number of grains that have come
	compare  vmdkComparison

	at   int64  // in the disk
	next int64  // where the next data begins, or the end of the disk
	data []byte // data at next
	buf  bytes.Buffer
	zlib io.ReadCloser // nil: not used yet
	raw  []byte
}

func newVMDK(in *bufio.Reader) *vmdkReader { return &vmdkReader{in: in} }

func (v *vmdkReader) Read(p []byte) (n int, err error) {
	if !v.begun {
		if err := v.begin(); err != nil {
			return 0, err
		}
		v.begun = true
	}
	for n < len(p) {
		switch {
		case v.at < v.next:
			part := p[n:][:min(int64(len(p)-n), v.next-v.at)]
			clear(part)
			n, v.at = n+len(part), v.at+int64(len(part))
		case len(v.data) > 0:
			c := copy(p[n:], v.data)
			n, v.at, v.data = n+c, v.at+int64(c), v.data[c:]
			v.next = v.at
		case v.ended:
			return n, io.EOF
		default:
			if err := v.more(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// take reads n bytes.
func (v *vmdkReader) take(p []byte) error {
	n, err := io.ReadFull(v.in, p)
	if v.pos += int64(n); err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// begin reads everything before the grains.
func (v *vmdkReader) begin() error {
	head := make([]byte, vmdkSector)
	if err := v.take(head); err != nil {
		return err
	}
	h, err := foreign.ReadVMDKHeader(head)
	switch {
	case err != nil:
		return refuse("%v", err)
	case h.Compression != vmdkDeflate:
		return refuse("is a VMDK image with the compression %d, and only deflate is known",
			h.Compression)
	case h.Directory != vmdkAtEnd && (h.Directory == 0 || h.Directory >= h.Begin):
		return refuse("is a VMDK image with its grain directory at sector %d, behind where its "+
			"grains begin; convert it with \"qemu-img convert -O qcow2\"", h.Directory)
	}
	v.head, v.capacity, v.grain = h, h.Capacity, h.Grain
	v.room = vmdkRoom + h.Capacity/h.Grain*vmdkRoomGrain
	if h.Begin > uint64(v.room)/vmdkSector {
		return refuse("is a damaged VMDK image: its grains begin at sector %d", h.Begin)
	}
	v.atEnd = h.Directory == vmdkAtEnd
	v.compare.init(h)
	if err := v.skipTo(int64(h.Descriptor) * vmdkSector); err != nil {
		return err
	}
	text := make([]byte, h.DescriptorSectors*vmdkSector)
	if err := v.take(text); err != nil {
		return err
	}
	if err := foreign.CheckVMDKDescriptor(text); err != nil {
		return refuse("%v", err)
	}
	begin := int64(h.Begin)
	if !v.atEnd {
		if err := v.countGrains(int64(h.Directory), v.compare.entries, begin); err != nil {
			return err
		}
	}
	return v.skipTo(begin * vmdkSector)
}

// skipTo goes on to a place of the image.
func (v *vmdkReader) skipTo(off int64) error {
	if off < v.pos {
		return refuse("is a VMDK image whose parts are in an order that cannot be read as it " +
			"comes; convert it with \"qemu-img convert -O qcow2\"")
	}
	n, err := io.CopyN(io.Discard, v.in, off-v.pos)
	if v.pos += n; err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// countGrains counts the grains in tables before the grains. Such an image has no end marker, and
// only this number shows whether it is complete.
func (v *vmdkReader) countGrains(directory, entries, begin int64) error {
	if directory*vmdkSector+entries*4 > begin*vmdkSector {
		return refuse("is a damaged VMDK image: its grain directory runs into its grains")
	}
	if err := v.skipTo(directory * vmdkSector); err != nil {
		return err
	}
	all := make([]byte, entries*4)
	if err := v.take(all); err != nil {
		return err
	}
	table := make([]byte, vmdkTableSize)
	for i := uint32(0); len(all) > 0; i, all = i+1, all[4:] {
		off := int64(binary.LittleEndian.Uint32(all))
		if off == 0 {
			continue
		}
		if off+int64(len(table)/vmdkSector) > begin {
			return refuse("is a damaged VMDK image: a grain table lies among the grains")
		}
		if err := v.skipTo(off * vmdkSector); err != nil {
			return err
		}
		if err := v.take(table); err != nil {
			return err
		}
		v.compare.said.add(i, table, v.head.ZeroGrains())
		for e := table; len(e) > 0; e = e[4:] {
			if binary.LittleEndian.Uint32(e) > 0 { // the writer leaves out zeros
				v.tables++
			}
		}
	}
	return nil
}

// more reads markers up to the next grain.
func (v *vmdkReader) more() error {
	for {
		head := make([]byte, 16)
		if _, err := v.in.Peek(1); err == io.EOF && !v.atEnd {
			return v.end()
		}
		if err := v.take(head[:12]); err != nil {
			return err
		}
		value, size := binary.LittleEndian.Uint64(head), binary.LittleEndian.Uint32(head[8:])
		if size > 0 {
			return v.readGrain(value, int64(size))
		}
		if err := v.take(head[12:]); err != nil {
			return err
		}
		if err := v.align(); err != nil {
			return err
		}
		switch kind := binary.LittleEndian.Uint32(head[12:]); kind {
		case vmdkEnd:
			v.compare.endsAt = v.pos - vmdkSector
			return v.end()
		case vmdkGT, vmdkGD, vmdkFooter:
			if value >= uint64(v.room)/vmdkSector {
				return refuse("is a damaged VMDK image: its tables are too long")
			}
			v.room -= int64(value+1) * vmdkSector
			end := v.pos + int64(value)*vmdkSector
			if v.atEnd {
				if err := v.readTables(kind, end); err != nil {
					return err
				}
			}
			if err := v.skipTo(end); err != nil {
				return err
			}
		default:
			return refuse("is a damaged VMDK image: a marker has the kind %d", kind)
		}
	}
}

// align goes on to the next sector.
func (v *vmdkReader) align() error {
	return v.skipTo((v.pos + vmdkSector - 1) / vmdkSector * vmdkSector)
}

// readGrain reads the data behind a marker.
func (v *vmdkReader) readGrain(sector uint64, size int64) error {
	off := int64(min(sector, uint64(v.capacity/vmdkSector))) * vmdkSector
	begins := (v.pos - 12) / vmdkSector
	switch {
	case off >= v.capacity || off%v.grain != 0:
		return refuse("is a damaged VMDK image: a grain is for sector %d", sector)
	case off < v.at:
		return refuse("is a VMDK image whose grains are not in the order of the disk; convert it " +
			"with \"qemu-img convert -O qcow2\"")
	case size > 2*v.grain+vmdkSector:
		return refuse("is a damaged VMDK image: a grain has %d compressed bytes", size)
	}
	if int64(cap(v.raw)) < size {
		v.raw = make([]byte, size)
	}
	v.raw = v.raw[:size]
	if err := v.take(v.raw); err != nil {
		return err
	}
	if err := v.inflate(min(v.grain, v.capacity-off)); err != nil {
		return refuse("is a damaged VMDK image: the grain of sector %d: %v; fetch it again",
			sector, err)
	}
	v.grains++
	v.compare.grain(off/v.grain, begins)
	v.next, v.data = off, v.buf.Bytes()[:min(v.grain, v.capacity-off)]
	// The file may end within the last sector of the last grain.
	if err := v.align(); err != nil && (v.atEnd || !errors.Is(err, io.ErrUnexpectedEOF)) {
		return err
	}
	return nil
}

// inflate decompresses a grain of at least that many bytes.
func (v *vmdkReader) inflate(least int64) (err error) {
	if v.zlib == nil {
		v.zlib, err = zlib.NewReader(bytes.NewReader(v.raw))
	} else {
		err = v.zlib.(zlib.Resetter).Reset(bytes.NewReader(v.raw), nil)
	}
	if err != nil {
		v.zlib = nil
		return err
	}
	v.buf.Reset()
	n, err := io.Copy(&v.buf, io.LimitReader(v.zlib, v.grain+1))
	switch {
	case err != nil:
		return err
	case n > v.grain || n < least:
		return fmt.Errorf("it has %d bytes", n)
	}
	return nil
}

// end checks the end of the image. The rest of the disk is zeros.
func (v *vmdkReader) end() error {
	if !v.atEnd && v.grains != v.tables {
		return refuse("ends in the middle of its vmdk data: it has %d of %d grains; fetch it again",
			v.grains, v.tables)
	}
	if !v.compare.same(v.atEnd) {
		return refuse("is a VMDK image whose tables say something else than its grains: a " +
			"program that reads it by its tables sees another disk; fetch it again, or choose " +
			"between the two with \"qemu-img convert -O qcow2\", which believes the tables")
	}
	for n := 0; ; n++ {
		switch c, err := v.in.ReadByte(); {
		case err == io.EOF:
			v.next, v.ended = v.capacity, true
			return nil
		case err != nil:
			return err
		case c != 0 || n > maxPadding:
			return refuse("continues after the end of its vmdk data; fetch it again")
		}
	}
}
