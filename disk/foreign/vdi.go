package foreign

import (
	"context"
	"encoding/binary"
	"math/bits"
)

// VDI is the format of VirtualBox, here its version 1.1. All numbers are little-endian. The text at
// the beginning has 64 bytes:
//
//	64 signature  68 version  76 type  340 offset of the table  344 offset of the blocks
//	360 bytes of a sector  368 size of the disk  376 bytes of a block  380 bytes before a block
//	384 blocks  424 UUID of the parent
//
// The table has the index of each block among those that are stored.
const (
	vdiHead      = 512
	vdiSignature = 0xbeda107f
	vdiVersion   = 1 // its upper half
	vdiDynamic   = 1 // types
	vdiFixed     = 2
	vdiNone      = 1<<32 - 1
	vdiZeros     = 1<<32 - 2
)

func parseVDI(ctx context.Context, f *file) (*layout, error) {
	le := binary.LittleEndian
	head, err := f.part(ctx, 0, vdiHead)
	if err != nil {
		return nil, err
	}
	kind, block, extra := le.Uint32(head[76:]), le.Uint32(head[376:]), le.Uint32(head[380:])
	table, data := int64(le.Uint32(head[340:])), int64(le.Uint32(head[344:]))
	size, blocks := le.Uint64(head[368:]), int64(le.Uint32(head[384:]))
	parent := !allZero(head[424:440])
	switch {
	case le.Uint32(head[64:]) != vdiSignature:
		return nil, f.damaged("it has no signature")
	case le.Uint16(head[70:]) != vdiVersion:
		return nil, f.unsupported(byQEMU, "of version %d, and only 1 is known",
			le.Uint16(head[70:]))
	case parent:
		return nil, f.hasParent()
	case kind != vdiDynamic && kind != vdiFixed:
		return nil, f.unsupported(byQEMU, "of type %d, and only dynamic (1) and fixed (2) ones "+
			"are known", kind)
	case block < minBlock || block > maxBlock || bits.OnesCount32(block) != 1:
		return nil, f.damaged("its blocks have %d bytes", block)
	case extra != 0 || le.Uint32(head[360:]) != 512:
		return nil, f.unsupported(byQEMU, "with sectors of %d bytes, and %d bytes before each "+
			"block", le.Uint32(head[360:]), extra)
	case size == 0 || size > maxSize:
		return nil, f.damaged("its disk has %d bytes", size)
	}
	l := &layout{size: int64(size), block: int64(block), unit: 512, entry: 4}
	switch {
	case l.blocks() > blocks:
		return nil, f.damaged("its table has %d entries, and the disk needs %d", blocks, l.blocks())
	case table < vdiHead || data%512 != 0 || table+blocks*l.entry > data:
		return nil, f.damaged("its table lies at %d, and its blocks at %d", table, data)
	}
	l.taken = []span{{"table", 0, table + l.blocks()*l.entry}}
	l.table = func(_ context.Context, i int64) (at, n int64, err error) {
		return table + i*l.entry, l.blocks() - i, nil
	}
	l.place = func(_ int64, entry []byte) (int64, error) {
		index := le.Uint32(entry)
		if index == vdiNone || index == vdiZeros {
			return -1, nil
		}
		return data + int64(index)*l.block, nil
	}
	return l, nil
}
