package foreign

import (
	"encoding/binary"
	"hash/crc32"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// Where the parts of vhdxOf are.
const (
	testHead  = 64 << 10
	testHead2 = 128 << 10
	testReg   = 192 << 10
	testReg2  = 256 << 10
	testMeta  = 2 << 20
	testItems = testMeta + 64<<10
	testBAT   = 3 << 20
	testData  = 4 << 20
)

// vhdxOf makes an image: of a disk in blocks of 1 MiB, with these entries of its BAT.
func vhdxOf(size int64, sector uint32, bat ...uint64) *sparse {
	le := binary.LittleEndian
	head := make([]byte, vhdxHeader)
	copy(head, "head")
	le.PutUint16(head[66:], 1)
	le.PutUint32(head[68:], 1<<20)
	le.PutUint64(head[72:], 1<<20)
	head2 := append([]byte(nil), head...)
	le.PutUint64(head2[8:], 1)
	regions := make([]byte, vhdxRegions)
	copy(regions, "regi")
	le.PutUint32(regions[8:], 2)
	for i, r := range []struct {
		id  string
		off uint64
	}{{vhdxBAT, testBAT}, {vhdxMetadata, testMeta}} {
		e := regions[16+32*i:]
		copy(e, r.id)
		le.PutUint64(e[16:], r.off)
		le.PutUint32(e[24:], 1<<20)
		le.PutUint32(e[28:], 1)
	}
	table, items := make([]byte, vhdxRegions), make([]byte, 64)
	copy(table, "metadata")
	le.PutUint16(table[10:], 3)
	for i, m := range []struct {
		id     string
		length uint32
	}{{vhdxParameters, 8}, {vhdxSize, 8}, {vhdxSector, 4}} {
		e := table[32+32*i:]
		copy(e, m.id)
		le.PutUint32(e[16:], vhdxRegions+uint32(i)*16)
		le.PutUint32(e[20:], m.length)
		le.PutUint32(e[24:], vhdxRequired)
	}
	le.PutUint32(items, 1<<20)
	le.PutUint64(items[16:], uint64(size))
	le.PutUint32(items[32:], sector)
	entries := make([]byte, 8*len(bat))
	for i, e := range bat {
		le.PutUint64(entries[8*i:], e)
	}
	s := &sparse{size: 16 << 20, parts: map[int64][]byte{0: []byte("vhdxfile"), testHead: head,
		testHead2: head2, testReg: regions, testReg2: append([]byte(nil), regions...),
		testMeta: table, testItems: items, testBAT: entries}}
	return vhdxSummed(s)
}

// vhdxSummed makes the checksums right.
func vhdxSummed(s *sparse) *sparse {
	for _, off := range []int64{testHead, testHead2, testReg, testReg2} {
		p := s.parts[off]
		clear(p[4:8])
		binary.LittleEndian.PutUint32(p[4:], crc32.Checksum(p, castagnoli))
	}
	return s
}

// at is the entry of a block at so many MiB.
func at(mib uint64) uint64 { return mib<<20 | vhdxPresent }

// TestVHDX reads an image with every kind of block, also with sectors of 4096 bytes.
func TestVHDX(t *testing.T) {
	for _, sector := range []uint32{512, 4096} {
		s := vhdxOf(6<<20+4096, sector, at(9), 0, at(4), 2|7<<20, 3, 5, at(6))
		s.parts[9<<20+5] = []byte("first")
		s.parts[4<<20-1] = []byte("-third")
		s.parts[6<<20+4090] = []byte("at end, and past it")
		im := testtool.Must(Open(bg, VHDX, s, s.size, Options{}))(t)
		got := content(t, im)
		require.Len(t, got, 6<<20+4096)
		require.Equal(t, "first", string(got[5:10]))
		require.Equal(t, "third", string(got[2<<20:2<<20+5]))
		require.Equal(t, "at end", string(got[6<<20+4090:]))
		require.Equal(t, int64(2<<20+4096), im.Stored())
		require.Empty(t, strings.Trim(string(got[3<<20:6<<20]), "\x00"))
	}
}

// TestVHDXChunks: after so many blocks, the BAT has an entry that is none of a block.
func TestVHDXChunks(t *testing.T) {
	const ratio = 4096 // with sectors of 512 bytes, in blocks of 1 MiB
	bat := make([]uint64, 2*ratio+3)
	bat[0], bat[ratio-1], bat[ratio], bat[ratio+1], bat[2*ratio+2] = at(4), at(5), 7, at(8),
		at(9)
	s := vhdxOf((2*ratio+1)<<20, 512, bat...)
	for i, off := range []int64{4, 5, 8, 9} {
		s.parts[off<<20] = []byte{byte('a' + i)}
	}
	im := testtool.Must(Open(bg, VHDX, s, s.size, Options{}))(t)
	for block, want := range map[int64]byte{0: 'a', ratio - 1: 'b', ratio: 'c', 2 * ratio: 'd'} {
		require.Equal(t, want, filetest.Read(t, im, block<<20, 1)[0], "block %d", block)
	}
	require.Equal(t, int64(4<<20), im.Stored())
}

// TestVHDXCopies: of two headers and two region tables, the right and newer one counts.
func TestVHDXCopies(t *testing.T) {
	le := binary.LittleEndian
	open := func(change func(s *sparse)) error {
		s := vhdxOf(1<<20, 512, at(4))
		change(s)
		_, err := Open(bg, VHDX, s, s.size, Options{})
		return err
	}
	unclosed := func(s *sparse, off int64) {
		s.parts[off][50] = 1
		vhdxSummed(s)
	}
	require.NoError(t, open(func(s *sparse) { unclosed(s, testHead) }), "the older one")
	require.ErrorContains(t, open(func(s *sparse) { unclosed(s, testHead2) }), "check -r all")
	require.NoError(t, open(func(s *sparse) { s.parts[testHead2][50]++ }), "a wrong checksum")
	require.NoError(t, open(func(s *sparse) { s.parts[testHead][50]++ }), "a wrong checksum")
	require.NoError(t, open(func(s *sparse) { s.parts[testReg][50]++ }), "a wrong checksum")
	require.NoError(t, open(func(s *sparse) { s.parts[testReg2][50]++ }), "a wrong checksum")
	require.NoError(t, open(func(s *sparse) {
		le.PutUint64(s.parts[testHead][8:], 1)
		vhdxSummed(s)
	}), "the same twice")
	require.ErrorContains(t, open(func(s *sparse) {
		le.PutUint64(s.parts[testHead][8:], 1)
		unclosed(s, testHead)
	}), "the same number")
}

// TestVHDXRefused: what a hostile or damaged image says is not believed.
func TestVHDXRefused(t *testing.T) {
	le := binary.LittleEndian
	heads := func(f func(p []byte)) func(s *sparse) {
		return func(s *sparse) { f(s.parts[testHead]); f(s.parts[testHead2]) }
	}
	regions := func(f func(p []byte)) func(s *sparse) {
		return func(s *sparse) { f(s.parts[testReg]); f(s.parts[testReg2]) }
	}
	table := func(f func(p []byte)) func(s *sparse) {
		return func(s *sparse) { f(s.parts[testMeta]) }
	}
	items := func(f func(p []byte)) func(s *sparse) {
		return func(s *sparse) { f(s.parts[testItems]) }
	}
	bat := func(entries ...uint64) func(s *sparse) {
		return func(s *sparse) {
			for i, e := range entries {
				le.PutUint64(s.parts[testBAT][8*i:], e)
			}
		}
	}
	entry := func(i int) int { return 16 + 32*i }
	for name, c := range map[string]struct {
		change func(s *sparse)
		want   string
	}{
		"a log": {heads(func(p []byte) { p[48] = 1 }), "was not closed"},
		"another version": {heads(func(p []byte) { p[66] = 2 }),
			"of version 2"},
		"a log beyond the end": {heads(func(p []byte) { le.PutUint64(p[72:], 1<<62) }),
			"its log has"},
		"a log at the end": {heads(func(p []byte) { le.PutUint32(p[68:], 1<<31) }),
			"runs past"},
		"a log in the header": {heads(func(p []byte) { le.PutUint64(p[72:], 0) }), "its log has"},
		"a log in the metadata": {heads(func(p []byte) { le.PutUint64(p[72:], testMeta) }),
			"overlaps"},
		"a log that is crooked": {heads(func(p []byte) { le.PutUint64(p[72:], 1<<20+1) }),
			"its log has"},
		"many regions": {regions(func(p []byte) { le.PutUint32(p[8:], 1<<31) }),
			"has 2147483648 entries"},
		"no regions": {regions(func(p []byte) { le.PutUint32(p[8:], 0) }), "lacks the BAT"},
		"a BAT twice": {regions(func(p []byte) { copy(p[entry(1):], p[entry(0):entry(1)]) }),
			"two entries for its BAT"},
		"an unknown region": {regions(func(p []byte) { p[entry(0)]++ }), "has to be understood"},
		"a BAT that is the metadata": {regions(func(p []byte) {
			le.PutUint64(p[entry(0)+16:], testMeta)
		}), "overlaps"},
		"a BAT beyond the end": {regions(func(p []byte) {
			le.PutUint64(p[entry(0)+16:], 1<<40)
		}), "its BAT has"},
		"a BAT at the end": {regions(func(p []byte) {
			le.PutUint32(p[entry(0)+24:], 1<<31)
		}), "runs past the end"},
		"a BAT of nothing": {regions(func(p []byte) { le.PutUint32(p[entry(0)+24:], 0) }),
			"its BAT has 0 bytes"},
		"metadata at the end": {regions(func(p []byte) {
			le.PutUint64(p[entry(1)+16:], 16<<20)
		}), "cut off"},
		"no metadata":   {table(func(p []byte) { p[0] = 'M' }), "metadata table"},
		"many items":    {table(func(p []byte) { le.PutUint16(p[10:], 1<<15) }), "32768 entries"},
		"few items":     {table(func(p []byte) { le.PutUint16(p[10:], 2) }), "do not say the size"},
		"an item twice": {table(func(p []byte) { copy(p[64:], p[32:64]) }), "an item twice"},
		"an unknown item": {table(func(p []byte) { p[32]++ }),
			"have to be understood"},
		"an item in the table": {table(func(p []byte) { le.PutUint32(p[32+16:], 0) }),
			"8 bytes at 0"},
		"an item outside": {table(func(p []byte) { le.PutUint32(p[32+16:], 1<<20-4) }),
			"8 bytes at 1048572"},
		"a long item": {table(func(p []byte) { le.PutUint32(p[32+20:], 1<<31) }),
			"2147483648 bytes"},
		"a parent": {items(func(p []byte) { p[4] = vhdxParent }), "its parent"},
		"the locator of a parent": {table(func(p []byte) {
			le.PutUint16(p[10:], 4)
			copy(p[128:], vhdxParentOf)
		}), "its parent"},
		"odd blocks":  {items(func(p []byte) { le.PutUint32(p, 3<<20) }), "blocks have"},
		"no blocks":   {items(func(p []byte) { le.PutUint32(p, 0) }), "blocks have 0"},
		"huge blocks": {items(func(p []byte) { le.PutUint32(p, 1<<31) }), "blocks have"},
		"odd sectors": {items(func(p []byte) { le.PutUint32(p[32:], 513) }), "sectors have 513"},
		"no size":     {items(func(p []byte) { le.PutUint64(p[16:], 0) }), "disk has 0"},
		"an odd size": {items(func(p []byte) { le.PutUint64(p[16:], 1000) }), "disk has 1000"},
		"an exabyte":  {items(func(p []byte) { le.PutUint64(p[16:], 1<<60) }), "disk has"},
		"64 TiB in a small BAT": {items(func(p []byte) { le.PutUint64(p[16:], 64<<40) }),
			"the disk needs"},
		"a block beyond the end":  {bat(at(15), at(16)), "block 1 of the disk lies at 16777216"},
		"a block at 2^63":         {bat(at(1 << 43)), "block 0 of the disk lies at"},
		"a block at the very end": {bat(1<<64 - 2), "block 0 of the disk lies at"},
		"a block in the header":   {bat(at(0)), "in its header"},
		"a block in the log":      {bat(at(1)), "in its log"},
		"a block in the metadata": {bat(at(2)), "in its metadata"},
		"a block in the BAT":      {bat(0, at(3)), "in its BAT"},
		"a block twice": {bat(at(5), at(6), at(5)),
			"block 2 of the disk lies at 5242880, where"},
		"a block with its parent's": {bat(7), "its parent"},
		"an unknown state":          {bat(0, 4), "the state 4"},
	} {
		s := vhdxOf(3<<20, 512, at(4), at(5), at(6))
		c.change(s)
		refused(t, name, VHDX, vhdxSummed(s), c.want)
	}
	forged := vhdxOf(3<<20, 512, at(4))
	forged.parts[testHead][100]++
	forged.parts[testHead2][100]++
	refused(t, "forged headers", VHDX, forged, "its two headers")
	forged = vhdxOf(3<<20, 512, at(4))
	forged.parts[testReg][100]++
	forged.parts[testReg2][100]++
	refused(t, "forged regions", VHDX, forged, "its two region tables")
	for _, n := range []int64{0, 100, testHead + 10, testReg2, testMeta + 1000, testBAT, 6 << 20} {
		cut := vhdxOf(3<<20, 512, at(4), at(5), at(6))
		cut.size = n
		refused(t, "cut", VHDX, cut, "")
	}
	// Large blocks may lie upon each other without the same beginning.
	s := vhdxOf(8<<20, 512, at(7), at(10))
	le.PutUint32(s.parts[testItems], 4<<20)
	refused(t, "half upon the one before", VHDX, s, "where another one is")
	s = vhdxOf(8<<20, 512, at(10), at(7))
	le.PutUint32(s.parts[testItems], 4<<20)
	refused(t, "half upon the one behind", VHDX, s, "where another one is")
	s = vhdxOf(8<<20, 512, at(4), at(8))
	le.PutUint32(s.parts[testItems], 4<<20)
	require.NoError(t, testtool.Err(Open(bg, VHDX, s, s.size, Options{})))
	_, err := Open(bg, VHDX, s, s.size, Options{MaxVirtualSize: 4 << 20})
	require.ErrorContains(t, err, "more than the limit")
	// However large it claims to be, its memory is bounded.
	s = vhdxOf(63<<40, 512, at(4))
	s.size = 1 << 50
	le.PutUint32(s.parts[testReg][16+24:], 1<<30)
	le.PutUint32(s.parts[testReg2][16+24:], 1<<30)
	le.PutUint64(s.parts[testReg][16+16:], 1<<49)
	le.PutUint64(s.parts[testReg2][16+16:], 1<<49)
	refused(t, "a petabyte", VHDX, vhdxSummed(s), "too many to check")
}

// FuzzVHDX keeps the checksums right, so that the fuzzer spends its time on what they protect.
func FuzzVHDX(f *testing.F) {
	s := vhdxOf(3<<20, 512, at(4), 0, at(5))
	f.Add(s.parts[testHead][8:80], s.parts[testReg][8:80], s.parts[testMeta][8:128],
		s.parts[testItems], s.parts[testBAT])
	s = vhdxOf(5000<<20, 4096, at(4), at(6), 3)
	f.Add([]byte{}, []byte{}, []byte{}, s.parts[testItems], s.parts[testBAT])
	f.Fuzz(func(t *testing.T, head, regions, table, items, bat []byte) {
		s := vhdxOf(3<<20, 512, make([]uint64, 1024)...)
		for off, p := range map[int64][]byte{testHead: head, testHead2: head, testReg: regions,
			testReg2: regions, testMeta: table} {
			copy(s.parts[off][8:], p)
		}
		copy(s.parts[testItems], items)
		copy(s.parts[testBAT], bat)
		im, err := Open(bg, VHDX, vhdxSummed(s), s.size, Options{MaxVirtualSize: 1 << 40})
		if err == nil {
			readSome(t, im)
		}
	})
}
