package foreign

import (
	"bytes"
	"context"
	"encoding/binary"
	"hash/crc32"
	"math/bits"
)

// VHDX is the format of Hyper-V (MS-VHDX, "Virtual Hard Disk v2 (VHDX) File Format"). All numbers
// are little-endian. Each structure is at a multiple of 64 KiB or 1 MiB:
//
//	header    64 KiB and 128 KiB; the newer valid one counts (2.2.2)
//	          0 "head"  4 CRC-32C of 4 KiB  8 sequence number  48 GUID of the log  64 its version
//	          66 version  68 length of the log  72 its offset
//	regions   192 KiB and 256 KiB, the same twice (2.2.3)
//	          0 "regi"  4 CRC-32C of 64 KiB  8 entries  16 entries of 32 bytes:
//	          0 GUID  16 offset  24 length  28 required
//	metadata  0 "metadata"  10 entries  32 entries of 32 bytes (2.6.1):
//	          0 GUID  16 offset in the region  20 length  24 flags
//	BAT       an entry of 8 bytes for each block, and one for a bitmap after each chunk of blocks
//	          (2.5.1): its low 3 bits are the state, and from bit 20 on the offset in MiB
const (
	vhdxMiB      = 1 << 20
	vhdxHeader   = 4 << 10
	vhdxRegions  = 64 << 10
	vhdxEntries  = 2047 // at most, of both tables
	vhdxRequired = 1 << 2
	vhdxParent   = 1 << 1 // of the file parameters
	vhdxChunk    = 1 << 23

	vhdxPresent = 6 // states of a block
	vhdxPartly  = 7
)

// GUIDs as they are stored: their first three parts are little-endian.
const (
	vhdxBAT      = "\x66\x77\xc2\x2d\x23\xf6\x00\x42\x9d\x64\x11\x5e\x9b\xfd\x4a\x08"
	vhdxMetadata = "\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e"

	vhdxParameters = "\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b"
	vhdxSize       = "\x24\x42\xa5\x2f\x1b\xcd\x76\x48\xb2\x11\x5d\xbe\xd8\x3b\xf4\xb8"
	vhdxSector     = "\x1d\xbf\x41\x81\x6f\xa9\x09\x47\xba\x47\xf2\x33\xa8\xfa\xab\x5f"
	vhdxPhysical   = "\xc7\x48\xa3\xcd\x5d\x44\x71\x44\x9c\xc9\xe9\x88\x52\x51\xc5\x56"
	vhdxPage83     = "\xab\x12\xca\xbe\xe6\xb2\x23\x45\x93\xef\xc3\x09\xe0\x00\xc7\x46"
	vhdxParentOf   = "\x2d\x5f\xd3\xa8\x0b\xb3\x4d\x45\xab\xf7\xd3\xd8\x48\x34\xab\x0c"
)

// vhdxItems are the lengths of the metadata items that are needed.
var vhdxItems = map[string]int64{vhdxParameters: 8, vhdxSize: 8, vhdxSector: 4}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// vhdxRight reports whether a structure has its signature and checksum.
func vhdxRight(p []byte, signature string) bool {
	want := binary.LittleEndian.Uint32(p[4:])
	sum := crc32.Update(0, castagnoli, p[:4])
	sum = crc32.Update(sum, castagnoli, make([]byte, 4))
	return string(p[:4]) == signature && crc32.Update(sum, castagnoli, p[8:]) == want
}

type vhdxParser struct {
	f       *file
	l       *layout
	regions map[string]span
	items   map[string][]byte
}

func parseVHDX(ctx context.Context, f *file) (*layout, error) {
	p := &vhdxParser{f: f, l: &layout{unit: vhdxMiB, entry: 8,
		taken: []span{{"header", 0, vhdxMiB}}}}
	for _, step := range []func(context.Context) error{p.header, p.regionTable, p.metadata,
		p.disk} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return p.l, nil
}

// header finds the header that counts.
func (p *vhdxParser) header(ctx context.Context) error {
	var head []byte
	le := binary.LittleEndian
	for _, off := range []int64{64 << 10, 128 << 10} {
		h, err := p.f.part(ctx, off, vhdxHeader)
		switch {
		case err != nil:
			return err
		case !vhdxRight(h, "head"): // damaged by a crash while it was written; the other one counts
		case head == nil || le.Uint64(h[8:]) > le.Uint64(head[8:]):
			head = h
		case le.Uint64(h[8:]) == le.Uint64(head[8:]) && !bytes.Equal(h, head):
			return p.f.damaged("its two headers have the same number and differ")
		}
	}
	if head == nil {
		return p.f.damaged("neither of its two headers has the right checksum")
	}
	version, logVersion := le.Uint16(head[66:]), le.Uint16(head[64:])
	if version != 1 || logVersion != 0 {
		return p.f.unsupported(byQEMU, "of version %d with a log of version %d, and only 1 and 0 "+
			"are known", version, logVersion)
	}
	if !allZero(head[48:64]) {
		return p.f.unsupported("have its log written back: attach it once in Hyper-V, or run "+
			"\"qemu-img check -r all\" on it and convert it with \"qemu-img convert -O qcow2\"",
			"that was not closed, so that its log has changes that the rest of it lacks")
	}
	length, off := int64(le.Uint32(head[68:])), le.Uint64(head[72:])
	if length == 0 {
		return nil
	}
	return p.take("log", off, length)
}

// take claims a range for metadata.
func (p *vhdxParser) take(name string, off uint64, length int64) error {
	if off%vhdxMiB != 0 || length%vhdxMiB != 0 || length == 0 || off < vhdxMiB ||
		off > uint64(p.f.size) {
		return p.f.damaged("its %s has %d bytes at %d", name, length, off)
	}
	p.l.taken = append(p.l.taken, span{name, int64(off), int64(off) + length})
	return nil
}

// regionTable finds the BAT and the metadata.
func (p *vhdxParser) regionTable(ctx context.Context) error {
	var table []byte
	for _, off := range []int64{192 << 10, 256 << 10} {
		t, err := p.f.part(ctx, off, vhdxRegions)
		if err != nil {
			return err
		}
		if vhdxRight(t, "regi") {
			table = t
			break
		}
	}
	if table == nil {
		return p.f.damaged("neither of its two region tables has the right checksum")
	}
	le := binary.LittleEndian
	n := le.Uint32(table[8:])
	if n > vhdxEntries {
		return p.f.damaged("its region table has %d entries", n)
	}
	p.regions = make(map[string]span)
	for e := table[16:]; n > 0; e, n = e[32:], n-1 {
		id := string(e[:16])
		name := map[string]string{vhdxBAT: "BAT", vhdxMetadata: "metadata"}[id]
		_, twice := p.regions[id]
		switch {
		case twice:
			return p.f.damaged("its region table has two entries for its %s", name)
		case name == "" && le.Uint32(e[28:])&1 != 0:
			return p.f.unsupported(byQEMU, "with a region that has to be understood and is not "+
				"known (%x)", id)
		case name == "":
			continue
		}
		if err := p.take(name, le.Uint64(e[16:]), int64(le.Uint32(e[24:]))); err != nil {
			return err
		}
		p.regions[id] = p.l.taken[len(p.l.taken)-1]
	}
	if len(p.regions) != 2 {
		return p.f.damaged("its region table lacks the BAT or the metadata")
	}
	return nil
}

// metadata reads the items that describe the disk.
func (p *vhdxParser) metadata(ctx context.Context) error {
	le, region := binary.LittleEndian, p.regions[vhdxMetadata]
	table, err := p.f.part(ctx, region.off, vhdxRegions)
	if err != nil {
		return err
	}
	n := le.Uint16(table[10:])
	if string(table[:8]) != "metadata" || n > vhdxEntries {
		return p.f.damaged("its metadata table has %d entries", n)
	}
	p.items = make(map[string][]byte)
	for e := table[32:]; n > 0; e, n = e[32:], n-1 {
		id, off, length := string(e[:16]), int64(le.Uint32(e[16:])), int64(le.Uint32(e[20:]))
		want, wanted := vhdxItems[id]
		switch {
		case id == vhdxParentOf:
			return p.f.hasParent()
		case !wanted && le.Uint32(e[24:])&vhdxRequired != 0 && id != vhdxPhysical &&
			id != vhdxPage83:
			return p.f.unsupported(byQEMU, "with metadata that have to be understood and are not "+
				"known (%x)", id)
		case !wanted:
			continue
		case p.items[id] != nil:
			return p.f.damaged("its metadata have an item twice (%x)", id)
		case length != want || off < vhdxRegions || off > region.end-region.off-length:
			return p.f.damaged("an item of its metadata has %d bytes at %d", length, off)
		}
		if p.items[id], err = p.f.part(ctx, region.off+off, length); err != nil {
			return err
		}
	}
	if len(p.items) != len(vhdxItems) {
		return p.f.damaged("its metadata do not say the size of the disk, of a block, and of " +
			"a sector")
	}
	return nil
}

// disk checks the size of the disk and the size of its BAT.
func (p *vhdxParser) disk(ctx context.Context) error {
	le := binary.LittleEndian
	block, flags := le.Uint32(p.items[vhdxParameters]), le.Uint32(p.items[vhdxParameters][4:])
	sector, size := int64(le.Uint32(p.items[vhdxSector])), le.Uint64(p.items[vhdxSize])
	switch {
	case flags&vhdxParent != 0:
		return p.f.hasParent()
	case block < vhdxMiB || block > 256*vhdxMiB || bits.OnesCount32(block) != 1:
		return p.f.damaged("its blocks have %d bytes", block)
	case sector != 512 && sector != 4096:
		return p.f.damaged("its sectors have %d bytes", sector)
	case size == 0 || size > maxSize || int64(size)%sector != 0:
		return p.f.damaged("its disk has %d bytes", size)
	}
	l := p.l
	l.size, l.block = int64(size), int64(block)
	bat, ratio := p.regions[vhdxBAT], vhdxChunk*sector/l.block
	if need := (l.blocks() + (l.blocks()-1)/ratio) * l.entry; need > bat.end-bat.off {
		return p.f.damaged("its BAT has %d bytes, and the disk needs %d", bat.end-bat.off, need)
	}
	l.table = func(_ context.Context, i int64) (at, n int64, err error) {
		return bat.off + (i+i/ratio)*l.entry, ratio - i%ratio, nil
	}
	l.place = func(i int64, entry []byte) (int64, error) {
		switch e := le.Uint64(entry); e & 7 {
		case vhdxPresent:
			return int64(e >> 20 << 20 &^ (1 << 63)), nil
		case vhdxPartly:
			return 0, p.f.hasParent()
		case 4:
			return 0, p.f.damaged("block %d of the disk has the state %d", i, e&7)
		}
		return -1, nil // not present, undefined, zeros, or unmapped (5 in older programs)
	}
	return nil
}

func allZero(p []byte) bool { return len(bytes.Trim(p, "\x00")) == 0 }
