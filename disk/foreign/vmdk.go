package foreign

import (
	"context"
	"encoding/binary"
	"math/bits"
	"strings"
)

// VMDK is the format of VMware (VMware, "Virtual Disk Format 5.0"), here as one file with holes
// (monolithicSparse). All numbers are little-endian. Places and sizes are in sectors:
//
//	header     0 "KDMV"  4 version  8 flags  12 size of the disk  20 of a grain  28 descriptor
//	           36 its size  44 entries of a grain table  56 grain directory  64 where grains begin
//	           73 line ends  77 compression
//	directory  where the grain tables are, each of 512 entries; 0: there is none
//	table      where the grains are; 0: nowhere; 1: zeros, if a flag is set
//
// All tables lie before the grains.
const (
	vmdkSector        = 512
	vmdkTable         = 512     // entries of a grain table
	vmdkMaxGrain      = 4096    // sectors
	vmdkMinGrain      = 8       // sectors
	vmdkMaxDescriptor = 128     // sectors
	vmdkMaxBegin      = 1 << 34 // sectors; more than the tables of the largest disk
	vmdkZeroGrains    = 1 << 2  // flags
	vmdkStream        = 1<<16 | 1<<17
)

// VMDKHeader is the beginning of a VMDK image of grains. Places are sectors.
type VMDKHeader struct {
	Capacity, Grain   int64 // of the disk, and of a grain; bytes
	Descriptor        uint64
	DescriptorSectors uint64
	Directory         uint64
	Begin             uint64 // of the grains
	Compression       uint16
	flags             uint32
}

// ReadVMDKHeader reads and checks a header of 512 bytes. Errors are an *Error.
func ReadVMDKHeader(head []byte) (h VMDKHeader, err error) {
	f, le := &file{what: "VMDK"}, binary.LittleEndian
	sectors, grain := le.Uint64(head[12:]), le.Uint64(head[20:])
	h = VMDKHeader{Descriptor: le.Uint64(head[28:]), DescriptorSectors: le.Uint64(head[36:]),
		Directory: le.Uint64(head[56:]), Begin: le.Uint64(head[64:]),
		Compression: le.Uint16(head[77:]), flags: le.Uint32(head[8:])}
	switch version := le.Uint32(head[4:]); {
	case version < 1 || version > 3:
		return h, f.unsupported(byQEMU, "of version %d, and 1 to 3 are known", version)
	case string(head[73:77]) != "\n \r\n":
		return h, f.damaged("it was transferred as a text")
	case sectors == 0 || sectors > maxSize/vmdkSector:
		return h, f.damaged("%d sectors are no size of a disk", sectors)
	case bits.OnesCount64(grain) != 1 || grain < vmdkMinGrain || grain > vmdkMaxGrain:
		return h, f.damaged("its grains have %d sectors", grain)
	case le.Uint32(head[44:]) != vmdkTable:
		return h, f.damaged("its tables have %d entries", le.Uint32(head[44:]))
	case h.Begin == 0 || h.Begin > vmdkMaxBegin:
		return h, f.damaged("its grains begin at sector %d", h.Begin)
	case h.Descriptor == 0:
		return h, f.isPart()
	case h.DescriptorSectors > vmdkMaxDescriptor || h.Descriptor >= h.Begin ||
		h.Descriptor+h.DescriptorSectors > h.Begin:
		return h, f.damaged("its descriptor has %d sectors at %d", h.DescriptorSectors,
			h.Descriptor)
	}
	h.Capacity, h.Grain = int64(sectors)*vmdkSector, int64(grain)*vmdkSector
	return h, f.checkBlocks((h.Capacity + h.Grain - 1) / h.Grain)
}

// ZeroGrains reports whether the entry 1 of a grain table stands for a grain of zeros.
func (h VMDKHeader) ZeroGrains() bool { return h.flags&vmdkZeroGrains != 0 }

// CheckVMDKDescriptor checks the descriptor, the text that says what the image consists of. An
// image that needs other files is refused. Errors are an *Error.
func CheckVMDKDescriptor(text []byte) error {
	f, extents := &file{what: "VMDK"}, 0
	for line := range strings.SplitSeq(string(text), "\n") {
		line = strings.TrimSpace(strings.TrimRight(line, "\x00"))
		key, value, _ := strings.Cut(line, "=")
		if strings.EqualFold(strings.TrimSpace(key), "parentCID") &&
			!strings.EqualFold(strings.TrimSpace(value), "ffffffff") {
			return f.hasParent()
		}
		for _, access := range []string{"RW ", "RDONLY ", "NOACCESS "} {
			if strings.HasPrefix(line, access) {
				extents++
			}
		}
	}
	switch {
	case extents == 0: // qemu-img writes parts of a disk so: with room for the text, and no text
		return f.isPart()
	case extents > 1:
		return f.unsupported(byQEMU, "of which this is one of %d files", extents)
	}
	return nil
}

// isPart is the error of a file that has a part of a disk, without the descriptor.
func (f *file) isPart() error {
	return f.unsupported("convert the descriptor, which is another file, with \"qemu-img "+
		"convert -O qcow2\"", "without what describes it: it has a part of a disk")
}

func parseVMDK(ctx context.Context, f *file) (*layout, error) {
	head, err := f.part(ctx, 0, vmdkSector)
	if err != nil {
		return nil, err
	}
	h, err := ReadVMDKHeader(head)
	switch {
	case err != nil:
		return nil, err
	case h.flags&vmdkStream != 0 || h.Compression != 0:
		return nil, f.unsupported(byQEMU, "whose grains are compressed")
	}
	text, err := f.part(ctx, int64(h.Descriptor)*vmdkSector, int64(h.DescriptorSectors)*vmdkSector)
	if err == nil {
		err = CheckVMDKDescriptor(text)
	}
	if err != nil {
		return nil, err
	}
	le, begin := binary.LittleEndian, int64(h.Begin)*vmdkSector
	l := &layout{size: h.Capacity, block: h.Grain, unit: vmdkSector, entry: 4,
		taken: []span{{"metadata", 0, begin}}}
	tables := (l.blocks() + vmdkTable - 1) / vmdkTable
	if h.Directory == 0 || h.Directory >= h.Begin || begin > f.size ||
		tables*4 > begin-int64(h.Directory)*vmdkSector {
		return nil, f.damaged("its grain directory lies at sector %d, and its grains at %d",
			h.Directory, h.Begin)
	}
	directory := span{off: int64(h.Directory) * vmdkSector}
	directory.end = directory.off + tables*4
	if err := checkTables(ctx, f, directory, begin); err != nil {
		return nil, err
	}
	l.table = func(ctx context.Context, i int64) (at, n int64, err error) {
		var e [4]byte
		if err := f.read(ctx, e[:], directory.off+i/vmdkTable*4); err != nil {
			return 0, 0, err
		}
		n = vmdkTable - i%vmdkTable
		if at = int64(le.Uint32(e[:])) * vmdkSector; at != 0 {
			at += i % vmdkTable * l.entry
		}
		return at, n, nil
	}
	l.place = func(_ int64, entry []byte) (int64, error) {
		sector := le.Uint32(entry)
		if sector == 0 || sector == 1 && h.flags&vmdkZeroGrains != 0 {
			return -1, nil
		}
		return int64(sector) * vmdkSector, nil
	}
	return l, nil
}

// checkTables checks where the grain tables of a directory lie: before the grains, and not on the
// directory or on each other.
func checkTables(ctx context.Context, f *file, directory span, begin int64) error {
	const length = vmdkTable * 4
	all, err := newClaims(f, begin, length, vmdkSector)
	if err != nil {
		return err
	}
	for off := directory.off; off < directory.end; {
		p, err := f.part(ctx, off, min(tablePiece, directory.end-off))
		if err != nil {
			return err
		}
		off += int64(len(p))
		for ; len(p) > 0; p = p[4:] {
			at := int64(binary.LittleEndian.Uint32(p)) * vmdkSector
			table := span{off: at, end: at + length}
			switch {
			case at == 0:
			case table.end > begin || table.overlaps(directory):
				return f.damaged("a grain table lies at %d, in the directory or among the grains",
					at)
			case !all.add(at):
				return f.damaged("a grain table lies at %d, where another one is", at)
			}
		}
	}
	return nil
}
