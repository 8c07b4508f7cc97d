package foreign

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const testBlock = 4 << 10

// vhdOf makes a dynamic image in blocks of 4 KiB, with these entries of its BAT.
func vhdOf(blocks int, bat ...uint32) *sparse {
	be := binary.BigEndian
	foot, head := make([]byte, vhdFooter), make([]byte, vhdHeader)
	copy(foot, "conectix")
	be.PutUint16(foot[12:], 1)
	be.PutUint64(foot[16:], 512)
	be.PutUint64(foot[48:], uint64(blocks)*testBlock)
	be.PutUint32(foot[60:], vhdDynamic)
	copy(head, "cxsparse")
	be.PutUint64(head[16:], 1536)
	be.PutUint16(head[24:], 1)
	be.PutUint32(head[28:], uint32(blocks))
	be.PutUint32(head[32:], testBlock)
	s := &sparse{size: 64 << 10, parts: map[int64][]byte{0: foot, 512: head,
		1536: table(be, bat), 64<<10 - 512: bytes.Clone(foot)}}
	return vhdSummed(s)
}

func table(order binary.AppendByteOrder, entries []uint32) (p []byte) {
	for _, e := range entries {
		p = order.AppendUint32(p, e)
	}
	return p
}

// vhdSummed makes the checksums right.
func vhdSummed(s *sparse) *sparse {
	for off, at := range map[int64]int{0: 64, 512: 36, 64<<10 - 512: 64} {
		p := s.parts[off]
		if p == nil {
			continue
		}
		clear(p[at : at+4])
		sum := uint32(0)
		for _, b := range p {
			sum += uint32(b)
		}
		binary.BigEndian.PutUint32(p[at:], ^sum)
	}
	return s
}

// vdiOf makes a dynamic image in blocks of 4 KiB, with these entries of its table.
func vdiOf(blocks int, entries ...uint32) *sparse {
	le, head := binary.LittleEndian, make([]byte, vdiHead)
	le.PutUint32(head[64:], vdiSignature)
	le.PutUint16(head[70:], 1)
	le.PutUint32(head[76:], vdiDynamic)
	le.PutUint32(head[340:], 512)
	le.PutUint32(head[344:], 1024)
	le.PutUint32(head[360:], 512)
	le.PutUint64(head[368:], uint64(blocks)*testBlock)
	le.PutUint32(head[376:], testBlock)
	le.PutUint32(head[384:], uint32(blocks))
	return &sparse{size: 64 << 10, parts: map[int64][]byte{0: head, 512: table(le, entries)}}
}

// vmdkOf makes an image of grains of 4 KiB with these entries of its only grain table. The
// directory is in sector 2, the table in sectors 3 to 6, and grains begin at sector 16.
func vmdkOf(blocks int, entries ...uint32) *sparse {
	le, head := binary.LittleEndian, make([]byte, vmdkSector)
	copy(head, "KDMV")
	le.PutUint32(head[4:], 1)
	le.PutUint64(head[12:], uint64(blocks)*testBlock/vmdkSector)
	le.PutUint64(head[20:], testBlock/vmdkSector)
	le.PutUint64(head[28:], 1)
	le.PutUint64(head[36:], 1)
	le.PutUint32(head[44:], vmdkTable)
	le.PutUint64(head[56:], 2)
	le.PutUint64(head[64:], 16)
	copy(head[73:], "\n \r\n")
	text := []byte("# Disk DescriptorFile\nparentCID=ffffffff\nRW 1 SPARSE \"x.vmdk\"\n")
	return &sparse{size: 64 << 10, parts: map[int64][]byte{0: head, 512: append(text,
		make([]byte, 512-len(text))...), 1024: table(le, []uint32{3, 0, 0, 0}),
		1536: append(table(le, entries), make([]byte, 2048-4*len(entries))...)}}
}

// TestOthers reads small images, also where a table is missing and the last block is short.
func TestOthers(t *testing.T) {
	vhd, vdi, vmdk := vhdOf(3, 12, vhdNone, 40), vdiOf(4, 1, vdiNone, 0, vdiZeros),
		vmdkOf(vmdkTable+1, 16, 0, 100)
	fixed := &sparse{size: 12<<10 + 512, parts: map[int64][]byte{12 << 10: vhdOf(3).parts[0]}}
	binary.BigEndian.PutUint32(fixed.parts[12<<10][60:], vhdFixed)
	binary.BigEndian.PutUint32(fixed.parts[12<<10][64:], 0)
	sum := uint32(0)
	for _, b := range fixed.parts[12<<10] {
		sum += uint32(b)
	}
	binary.BigEndian.PutUint32(fixed.parts[12<<10][64:], ^sum)
	for _, c := range []struct {
		format Format
		s      *sparse
		size   int64
		data   map[int64]int64 // of the disk: where it is in the file
	}{
		{VHD, vhd, 12 << 10, map[int64]int64{5: 13*512 + 5, 8<<10 + 4095: 41*512 + 4095}},
		{VHD, fixed, 12 << 10, map[int64]int64{0: 0, 12<<10 - 1: 12<<10 - 1}},
		{VDI, vdi, 16 << 10, map[int64]int64{1: 1024 + 4096 + 1, 8 << 10: 1024}},
		{VMDK, vmdk, (vmdkTable + 1) * testBlock, map[int64]int64{7: 16*512 + 7,
			8<<10 + 4095: 100*512 + 4095}},
	} {
		want := make([]byte, c.size)
		for at, place := range c.data {
			want[at] = byte(at) + 1
			c.s.parts[place] = []byte{byte(at) + 1}
		}
		im := testtool.Must(Open(bg, c.format, c.s, c.s.size, Options{}))(t, c.format)
		require.True(t, bytes.Equal(want, content(t, im)), c.format)
	}
	// The copy of a footer counts if the footer is damaged.
	vhd.parts[64<<10-512][20]++
	require.NoError(t, testtool.Err(Open(bg, VHD, vhd, vhd.size, Options{})))
	delete(vhd.parts, 64<<10-512)
	vhd.size = 41*512 + testBlock // the end of its last block
	require.NoError(t, testtool.Err(Open(bg, VHD, vhd, vhd.size, Options{})))
}

// TestOthersRefused: what a hostile or damaged image says is not believed.
func TestOthersRefused(t *testing.T) {
	be, le := binary.BigEndian, binary.LittleEndian
	foot := func(f func(p []byte)) func(s *sparse) {
		return func(s *sparse) { f(s.parts[0]); f(s.parts[64<<10-512]) }
	}
	head := func(f func(p []byte)) func(s *sparse) {
		return func(s *sparse) { f(s.parts[0]) }
	}
	second := func(f func(p []byte)) func(s *sparse) {
		return func(s *sparse) { f(s.parts[512]) }
	}
	type change struct {
		f    func(s *sparse)
		want string
	}
	check := func(format Format, of func(int, ...uint32) *sparse, tables map[string][]uint32,
		wants map[string]string, changes map[string]change) {
		for name, entries := range tables {
			refused(t, string(format)+": "+name, format, of(3, entries...), wants[name])
		}
		for name, c := range changes {
			s := of(3)
			c.f(s)
			if format == VHD {
				vhdSummed(s)
			}
			refused(t, string(format)+": "+name, format, s, c.want)
		}
		for _, n := range []int64{0, 100, 520, 1500} {
			s := of(3)
			s.size = n
			refused(t, "cut", format, s, "damaged")
		}
	}
	check(VHD, vhdOf, map[string][]uint32{"twice": {12, 12}, "upon the one before": {12, 20},
		"upon the one behind": {20, 12}, "in the copy": {0}, "in the header": {2},
		"in the BAT":    {3},
		"in the footer": {119}, "beyond": {1 << 30}, "far beyond": {vhdNone - 1}},
		map[string]string{"twice": "another one is", "upon the one before": "another one is",
			"upon the one behind": "another one is", "in the copy": "in its copy of the footer",
			"in the header": "in its header", "in the BAT": "in its BAT",
			"in the footer": "in its footer", "beyond": "and the file has",
			"far beyond": "and the file has"},
		map[string]change{
			"a parent": {foot(func(p []byte) { be.PutUint32(p[60:], vhdDifferencing) }),
				"its parent"},
			"a type":    {foot(func(p []byte) { be.PutUint32(p[60:], 7) }), "type is 7"},
			"a version": {foot(func(p []byte) { p[13] = 2 }), "of version 2"},
			"no size":   {foot(func(p []byte) { clear(p[48:56]) }), "disk has 0 bytes"},
			"an exabyte": {foot(func(p []byte) { be.PutUint64(p[48:], 1<<60) }),
				"disk has 1152921504606846976"},
			"an odd size": {foot(func(p []byte) { be.PutUint64(p[48:], 513) }), "disk has 513"},
			"fixed, and short": {foot(func(p []byte) {
				be.PutUint32(p[60:], vhdFixed)
				be.PutUint64(p[48:], 64<<10)
			}), "of a disk of 65536"},
			"a header at 2^63": {foot(func(p []byte) { be.PutUint64(p[16:], 1<<63) }),
				"header lies"},
			"a header that is the footer": {foot(func(p []byte) { clear(p[16:24]) }),
				"header does not have"},
			"a header's version": {second(func(p []byte) { p[25] = 3 }), "header of version 3"},
			"huge blocks": {second(func(p []byte) { be.PutUint32(p[32:], 1<<31) }),
				"blocks"},
			"odd blocks":  {second(func(p []byte) { be.PutUint32(p[32:], 5000) }), "blocks"},
			"no blocks":   {second(func(p []byte) { clear(p[32:36]) }), "blocks have 0"},
			"few entries": {second(func(p []byte) { be.PutUint32(p[28:], 2) }), "2 entries"},
			"a BAT at 2^63": {second(func(p []byte) { be.PutUint64(p[16:], 1<<63) }),
				"BAT lies"},
			"a BAT in the header": {second(func(p []byte) { be.PutUint64(p[16:], 600) }),
				"its BAT at 600 overlaps"},
			"a BAT at the end": {second(func(p []byte) { be.PutUint64(p[16:], 64<<10-4) }),
				"BAT at"},
		})
	forged := vhdOf(3)
	forged.parts[0][100]++
	forged.parts[64<<10-512][100]++
	refused(t, "forged footers", VHD, forged, "its footer does not")
	forged = vhdOf(3)
	forged.parts[512][100]++
	refused(t, "a forged header", VHD, forged, "its header does not")

	check(VDI, vdiOf, map[string][]uint32{"twice": {1, 1}, "beyond": {15},
		"far beyond": {vdiZeros - 1}},
		map[string]string{"twice": "another one is", "beyond": "the file has", "far beyond": "has"},
		map[string]change{
			"no signature": {head(func(p []byte) { p[64]++ }), "no signature"},
			"a version":    {head(func(p []byte) { p[70] = 2 }), "of version 2"},
			"a type":       {head(func(p []byte) { p[76] = 3 }), "of type 3"},
			"a parent":     {head(func(p []byte) { p[430] = 1 }), "its parent"},
			"huge blocks":  {head(func(p []byte) { le.PutUint32(p[376:], 1<<31) }), "blocks have"},
			"no blocks":    {head(func(p []byte) { clear(p[376:380]) }), "blocks have 0"},
			"more before":  {head(func(p []byte) { p[380] = 1 }), "before each block"},
			"sectors":      {head(func(p []byte) { p[361] = 16 }), "sectors of 4096"},
			"no size":      {head(func(p []byte) { clear(p[368:376]) }), "disk has 0"},
			"an exabyte":   {head(func(p []byte) { le.PutUint64(p[368:], 1<<60) }), "disk has"},
			"few entries":  {head(func(p []byte) { le.PutUint32(p[384:], 2) }), "2 entries"},
			"a long table": {head(func(p []byte) { le.PutUint32(p[384:], 1<<31) }), "table lies"},
			"a table in the header": {head(func(p []byte) { le.PutUint32(p[340:], 0) }),
				"table lies at 0"},
			"blocks in the table": {head(func(p []byte) { le.PutUint32(p[344:], 512) }),
				"blocks at 512"},
		})

	check(VMDK, vmdkOf, map[string][]uint32{"twice": {16, 16}, "upon another": {16, 20},
		"its table": {3}, "the header": {1}, "beyond": {121}, "far beyond": {1<<32 - 1}},
		map[string]string{"twice": "another one is", "upon another": "another one is",
			"its table": "in its metadata", "the header": "in its metadata",
			"beyond":     "the file has",
			"far beyond": "the file has"},
		map[string]change{
			"a version": {head(func(p []byte) { p[4] = 4 }), "of version 4"},
			"a text":    {head(func(p []byte) { p[75] = '\n' }), "as a text"},
			"no size":   {head(func(p []byte) { clear(p[12:20]) }), "no size of a disk"},
			"an exabyte": {head(func(p []byte) { le.PutUint64(p[12:], 1<<51) }),
				"no size of a disk"},
			"odd grains":  {head(func(p []byte) { p[20] = 9 }), "grains have 9"},
			"tiny grains": {head(func(p []byte) { p[20] = 1 }), "grains have 1"},
			"huge grains": {head(func(p []byte) { le.PutUint64(p[20:], 1<<40) }), "grains have"},
			"odd tables":  {head(func(p []byte) { le.PutUint32(p[44:], 1<<31) }), "tables have"},
			"no grains":   {head(func(p []byte) { clear(p[64:72]) }), "begin at sector 0"},
			"no descriptor": {head(func(p []byte) { clear(p[28:36]) }),
				"it has a part of a disk"},
			"an empty descriptor": {second(func(p []byte) { clear(p[:512]) }),
				"it has a part of a disk"},
			"a descriptor elsewhere": {head(func(p []byte) { le.PutUint64(p[28:], 1<<63) }),
				"descriptor has"},
			"compressed": {head(func(p []byte) { p[10] = 3 }), "compressed"},
			"a parent": {second(func(p []byte) { copy(p[32:], "12345678") }),
				"its parent"},
			"two files": {second(func(p []byte) { copy(p[100:], "\nRW 1 S") }),
				"one of 2"},
			"no directory": {head(func(p []byte) { p[56] = 0 }),
				"directory lies at sector 0"},
			"a directory at -1": {head(func(p []byte) { le.PutUint64(p[56:], 1<<64-1) }),
				"directory"},
			"a directory outside": {head(func(p []byte) { p[56] = 16 }),
				"directory lies at sector 16"},
			"tables to the end": {head(func(p []byte) { le.PutUint64(p[64:], 1<<30) }),
				"grains at 1073741824"},
			"too many grains": {func(s *sparse) {
				le.PutUint64(s.parts[0][12:], (maxBlocks+1)*testBlock/vmdkSector)
				le.PutUint64(s.parts[0][64:], 1<<26)
				clear(s.parts[1024])
				clear(s.parts[1536])
				s.size = 1 << 35
			}, "too many to check"},
			"a long directory": {head(func(p []byte) { le.PutUint64(p[12:], 1<<32) }),
				"directory lies"},
			"a table that is the directory": {func(s *sparse) { s.parts[1024][0] = 2 },
				"in the directory"},
			"a table that runs into it": {func(s *sparse) { s.parts[1024][0] = 1 },
				"in the directory"},
			"a table among the grains": {func(s *sparse) { s.parts[1024][0] = 13 },
				"among the grains"},
			"a table far away": {func(s *sparse) { le.PutUint32(s.parts[1024], 1<<32-1) },
				"among the grains"},
			"two tables are one": {func(s *sparse) {
				le.PutUint64(s.parts[0][12:], 2*vmdkTable*8)
				s.parts[1024][4] = 3
			}, "where another one is"},
			"two tables lie on each other": {func(s *sparse) {
				le.PutUint64(s.parts[0][12:], 2*vmdkTable*8)
				s.parts[1024][4] = 5
			}, "where another one is"},
		})
	_, err := Open(bg, VMDK, vmdkOf(2, 1), 64<<10, Options{})
	require.ErrorContains(t, err, "in its metadata", "without the flag, 1 is a place")
	zeros := vmdkOf(2, 1, 16)
	zeros.parts[0][8] = vmdkZeroGrains
	im := testtool.Must(Open(bg, VMDK, zeros, zeros.size, Options{}))(t)
	require.Equal(t, int64(testBlock), im.Stored())
	_, err = Open(bg, "qed", zeros, zeros.size, Options{})
	require.ErrorContains(t, err, "no reader")
}

// FuzzOthers keeps the checksums right, so that the fuzzer spends its time on what they protect.
func FuzzOthers(f *testing.F) {
	for i, s := range []*sparse{vhdOf(3, 12, vhdNone, 40), vdiOf(4, 1, vdiNone, 0),
		vmdkOf(3, 16, 0)} {
		f.Add(uint8(i), s.parts[0], s.parts[512], s.parts[1024], s.parts[1536])
	}
	f.Fuzz(func(t *testing.T, format uint8, a, b, c, d []byte) {
		kind := []Format{VHD, VDI, VMDK}[format%3]
		s := &sparse{size: 64 << 10, parts: map[int64][]byte{}}
		file := make([]byte, 4<<10)
		for i, p := range [][]byte{a, b, c, d} {
			copy(file[i*512:], p)
		}
		s.parts[2048] = file[2048:]
		s.parts[0], s.parts[512] = file[:512], file[512:1536]
		s.parts[1536] = file[1536:2048]
		if kind == VHD {
			vhdSummed(s)
		}
		im, err := Open(bg, kind, s, s.size, Options{MaxVirtualSize: 1 << 30})
		if err == nil {
			readSome(t, im)
		}
	})
}

// TestMemoryOfTables opens files with holes that have as many blocks as can be checked, and some
// that have more. Whether they are read or refused, the memory for the tables has a limit.
func TestMemoryOfTables(t *testing.T) {
	const most = maxClaims - 2
	sized := func(s *sparse, size int64) *sparse {
		s.size = size
		return s
	}
	vhd := func(blocks int64) *sparse {
		s := vhdOf(16, 8)
		size := blocks * (testBlock + 512)
		s.parts[size-512] = s.parts[64<<10-512]
		delete(s.parts, 64<<10-512)
		return sized(s, size)
	}
	vmdk := func(blocks int64) *sparse {
		s := vmdkOf(1)
		delete(s.parts, 1024) // the directory, which is longer, and has nothing
		delete(s.parts, 1536)
		le := binary.LittleEndian
		le.PutUint64(s.parts[0][12:], 1<<37/vmdkSector)
		le.PutUint64(s.parts[0][64:], 1<<26)
		return sized(s, blocks*testBlock)
	}
	for name, c := range map[string]struct {
		format Format
		file   *sparse
		wrong  string // "": nothing
	}{
		"vhd":                 {VHD, vhd(most), "in its copy of the footer"},
		"vhd, too large":      {VHD, vhd(2 * most), "too many to check"},
		"vdi":                 {VDI, sized(vdiOf(1<<24), most*testBlock), "table lies at"},
		"vdi, few":            {VDI, sized(vdiOf(16), most*testBlock), "where another one is"},
		"vdi, too large":      {VDI, sized(vdiOf(16), 2*most*testBlock), "too many to check"},
		"vmdk":                {VMDK, vmdk(most), ""},
		"vmdk, too large":     {VMDK, vmdk(2 * most), "too many to check"},
		"vhdx":                {VHDX, sized(vhdxOf(100<<30, 512), most<<20), ""},
		"vhdx, too large":     {VHDX, sized(vhdxOf(1<<30, 512), 2*most<<20), "too many to check"},
		"vhdx, a short table": {VHDX, sized(vhdxOf(1<<40, 512), most<<20), "its BAT has"},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			grew := testtool.HeapGrowth(t, func() {
				_, err = Open(bg, c.format, c.file, c.file.size, Options{})
			})
			require.Less(t, grew, int64(110<<20))
			if c.wrong == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.wrong)
			}
		})
	}
}
