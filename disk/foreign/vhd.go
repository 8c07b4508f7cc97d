package foreign

import (
	"context"
	"encoding/binary"
	"math/bits"
)

// VHD is the format of Virtual PC, Azure and Xen (Microsoft, "Virtual Hard Disk Image Format
// Specification 1.0"). All numbers are big-endian. A fixed image is the disk followed by a footer.
// A dynamic one has a copy of the footer at its beginning, and a table (BAT) of its blocks:
//
//	footer   0 "conectix"  12 version  16 offset of the header  48 size of the disk  60 type
//	         64 checksum  512 bytes
//	header   0 "cxsparse"  16 offset of the BAT  24 version  28 entries of the BAT  32 bytes of a
//	         block  36 checksum  1024 bytes
//	BAT      the sector of each block. A block begins with a bitmap of its sectors. It does not
//	         matter: the disk is zeros where nothing was written.
const (
	vhdFooter  = 512
	vhdHeader  = 1024
	vhdVersion = 1 // the upper half of both versions
	vhdNone    = 1<<32 - 1

	vhdFixed        = 2 // types
	vhdDynamic      = 3
	vhdDifferencing = 4

	minBlock = 4 << 10
	maxBlock = 16 << 20
)

// vhdRight reports whether a structure has its signature and its checksum. The checksum lies at
// sum, and is the complement of the sum of all other bytes.
func vhdRight(p []byte, signature string, sum int) bool {
	total := uint32(0)
	for i, b := range p {
		if i < sum || i >= sum+4 {
			total += uint32(b)
		}
	}
	return string(p[:8]) == signature && ^total == binary.BigEndian.Uint32(p[sum:])
}

func parseVHD(ctx context.Context, f *file) (*layout, error) {
	be := binary.BigEndian
	foot, err := f.part(ctx, f.size-vhdFooter, vhdFooter)
	taken := []span{{"footer", f.size - vhdFooter, f.size}}
	if err == nil && !vhdRight(foot, "conectix", 64) {
		// If a program dies while the image grows, the last block can lie where the footer was.
		taken = nil
		foot, err = f.part(ctx, 0, vhdFooter)
	}
	if err != nil {
		return nil, err
	}
	size, kind := be.Uint64(foot[48:]), be.Uint32(foot[60:])
	switch {
	case !vhdRight(foot, "conectix", 64):
		return nil, f.damaged("its footer does not have the right checksum")
	case be.Uint16(foot[12:]) != vhdVersion:
		return nil, f.unsupported(byQEMU, "of version %d, and only 1 is known",
			be.Uint16(foot[12:]))
	case kind == vhdDifferencing:
		return nil, f.hasParent()
	case kind != vhdFixed && kind != vhdDynamic:
		return nil, f.damaged("its type is %d", kind)
	case size == 0 || size > maxSize || size%512 != 0:
		return nil, f.damaged("its disk has %d bytes", size)
	}
	l := &layout{size: int64(size), block: int64(size), unit: 512, taken: taken}
	if kind == vhdFixed {
		if l.size > f.size-vhdFooter {
			return nil, f.damaged("it has %d bytes of a disk of %d", f.size-vhdFooter, size)
		}
		l.unit = l.size // the only block is the disk, at the beginning
		return l, nil
	}
	at := be.Uint64(foot[16:])
	if at > uint64(f.size) {
		return nil, f.damaged("its header lies at %d", at)
	}
	head, err := f.part(ctx, int64(at), vhdHeader)
	if err != nil {
		return nil, err
	}
	bat, entries, block := be.Uint64(head[16:]), be.Uint32(head[28:]), be.Uint32(head[32:])
	switch {
	case !vhdRight(head, "cxsparse", 36):
		return nil, f.damaged("its header does not have the right checksum")
	case be.Uint16(head[24:]) != vhdVersion:
		return nil, f.unsupported(byQEMU, "with a header of version %d, and only 1 is known",
			be.Uint16(head[24:]))
	case block < minBlock || block > maxBlock || bits.OnesCount32(block) != 1:
		return nil, f.damaged("its blocks have %d bytes", block)
	case bat > uint64(f.size):
		return nil, f.damaged("its BAT lies at %d", bat)
	}
	l.block, l.entry = int64(block), 4
	if l.blocks() > int64(entries) {
		return nil, f.damaged("its BAT has %d entries, and the disk needs %d", entries, l.blocks())
	}
	l.before = (l.block/512/8 + 511) / 512 * 512
	l.taken = append(l.taken, span{"copy of the footer", 0, vhdFooter},
		span{"header", int64(at), int64(at) + vhdHeader},
		span{"BAT", int64(bat), int64(bat) + l.blocks()*l.entry})
	l.table = func(_ context.Context, i int64) (at, n int64, err error) {
		return int64(bat) + i*l.entry, l.blocks() - i, nil
	}
	l.place = func(_ int64, entry []byte) (int64, error) {
		sector := be.Uint32(entry)
		if sector == vhdNone {
			return -1, nil
		}
		return int64(sector)*512 + l.before, nil
	}
	return l, nil
}
