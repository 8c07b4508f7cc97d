package scsi

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// read is the content of a range of blocks.
func (b *bench) read(lba uint32, blocks uint16) []byte {
	b.t.Helper()
	c := make([]byte, 10)
	c[0] = opRead10
	binary.BigEndian.PutUint32(c[2:], lba)
	binary.BigEndian.PutUint16(c[7:], blocks)
	return b.good(c, nil)
}

func (b *bench) write(lba uint32, data []byte) {
	b.t.Helper()
	c := make([]byte, 10)
	c[0] = opWrite10
	binary.BigEndian.PutUint32(c[2:], lba)
	binary.BigEndian.PutUint16(c[7:], uint16(len(data)/BlockSize))
	b.good(c, data)
}

func TestVerify(t *testing.T) {
	data := pattern(1024, 5)
	flipped := bytes.Clone(data)
	flipped[400*BlockSize+77] ^= 1
	same := bytes.Repeat(data[:BlockSize], 1)
	for _, c := range []struct {
		name, cdb, want string
		data            []byte
		info            uint32
	}{
		{"10, medium", "2f 00 00 00 00 00 00 04 00 00", "GOOD", nil, 0},
		{"10, data", "2f 02 00 00 00 00 00 04 00 00", "GOOD", data, 0},
		{"10, other data", "2f 02 00 00 00 00 00 04 00 00", "e/1d/00", flipped, 400*BlockSize + 77},
		{"12, other data", "af 02 00 00 00 00 00 00 04 00 00 00", "e/1d/00", flipped,
			400*BlockSize + 77},
		{"16, other data", "8f 02 00 00 00 00 00 00 00 00 00 00 04 00 00 00", "e/1d/00", flipped,
			400*BlockSize + 77},
		{"10, one block", "2f 06 00 00 00 00 00 00 01 00", "GOOD", same, 0},
		{"10, one block repeated", "2f 06 00 00 00 00 00 00 02 00", "e/1d/00", same, 0},
		{"10, repeated over zeros", "2f 06 00 00 10 00 00 04 00 00", "GOOD",
			make([]byte, BlockSize), 0},
		{"10, no blocks", "2f 02 00 00 00 00 00 00 00 00", "GOOD", nil, 0},
		{"10, repeated, no blocks", "2f 06 00 00 00 00 00 00 00 00", "GOOD", nil, 0},
		{"10, reserved BYTCHK", "2f 04 00 00 00 00 00 00 01 00", "5/24/00", nil, 0},
		{"10, protection", "2f 20 00 00 00 00 00 00 01 00", "5/24/00", nil, 0},
		{"10, beyond the end", "2f 00 00 00 4e 1f 00 00 02 00", "5/21/00", nil, 0},
		{"16, too much", "8f 00 00 00 00 00 00 00 00 00 00 02 00 01 00 00", "5/21/00", nil, 0},
		{"10, too little data", "2f 02 00 00 00 00 00 04 00 00", "5/0e/03", data[:4096], 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.write(0, data)
			r := b.run(cdb(c.cdb), c.data)
			require.Equal(t, c.want, r.outcome())
			if c.want == "e/1d/00" {
				require.EqualValues(t, 0xf0, r.sense[0], "INFORMATION is valid")
				if c.info != 0 {
					require.Equal(t, c.info, binary.BigEndian.Uint32(r.sense[3:]))
				}
			}
		})
	}
}

func TestSynchronizeCache(t *testing.T) {
	for _, c := range []struct {
		name, cdb, want string
		flushes         int
	}{
		{"10, everything", "35 00 00 00 00 00 00 00 00 00", "GOOD", 1},
		{"10, a range", "35 00 00 00 00 10 00 00 10 00", "GOOD", 1},
		{"10, immediately", "35 02 00 00 00 00 00 00 00 00", "GOOD", 1},
		{"16", "91 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "GOOD", 1},
		{"10, beyond the end", "35 00 00 00 4e 20 00 00 01 00", "5/21/00", 0},
		{"16, beyond the end", "91 00 00 00 00 00 00 00 4e 1f 00 00 00 02 00 00", "5/21/00", 0},
		{"10, SYNC_NV", "35 06 00 00 00 00 00 00 00 00", "GOOD", 1},
		{"10, reserved bit", "35 01 00 00 00 00 00 00 00 00", "5/24/00", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			require.Equal(t, c.want, b.run(cdb(c.cdb), nil).outcome())
			require.Equal(t, c.flushes, b.disk.count("flush"))
		})
	}
}

// TestWriteSameEndsWhereItShould fills a range that is not a multiple of its buffer. The block
// behind it stays.
func TestWriteSameEndsWhereItShould(t *testing.T) {
	b := newBench(t)
	const blocks = scratchSize/BlockSize + 3
	b.good(cdb("41 00 00 00 00 08 00 02 03 00"), pattern(1, 9))
	require.Equal(t, append(bytes.Repeat(pattern(1, 9), blocks), make([]byte, BlockSize)...),
		b.read(8, blocks+1))
}

func TestWriteSame(t *testing.T) {
	zeros, block := make([]byte, BlockSize), pattern(1, 9)
	for _, c := range []struct {
		name, cdb, want         string
		data                    []byte
		plain                   bool
		zero, discard, allocate int
	}{
		{name: "10", cdb: "41 00 00 00 00 08 00 04 00 00", want: "GOOD", data: block,
			allocate: 128},
		{name: "16", cdb: "93 00 00 00 00 00 00 00 00 08 00 00 04 00 00 00", want: "GOOD",
			data: block, allocate: 128},
		{name: "10, zeros", cdb: "41 00 00 00 00 08 00 04 00 00", want: "GOOD", data: zeros,
			zero: 1},
		{name: "10, zeros, plain disk", cdb: "41 00 00 00 00 08 00 04 00 00", want: "GOOD",
			data: zeros, plain: true, allocate: 128},
		{name: "10, unmap", cdb: "41 08 00 00 00 08 00 04 00 00", want: "GOOD", data: zeros,
			discard: 1},
		{name: "10, unmap what is not zero", cdb: "41 08 00 00 00 08 00 04 00 00", want: "GOOD",
			data: block, allocate: 128},
		{name: "16, no data", cdb: "93 01 00 00 00 00 00 00 00 08 00 00 04 00 00 00", want: "GOOD",
			zero: 1},
		{name: "16, no data, plain disk", cdb: "93 01 00 00 00 00 00 00 00 08 00 00 04 00 00 00",
			want: "GOOD", plain: true, allocate: 128},
		{name: "16, unmap, no data", cdb: "93 09 00 00 00 00 00 00 00 08 00 00 04 00 00 00",
			want: "GOOD", discard: 1},
		{name: "16, unmap, plain disk", cdb: "93 08 00 00 00 00 00 00 00 08 00 00 04 00 00 00",
			want: "5/24/00", data: zeros, plain: true},
		{name: "10, no data, which 10 bytes do not have", cdb: "41 01 00 00 00 08 00 04 00 00",
			want: "5/24/00"},
		{name: "anchor", cdb: "93 18 00 00 00 00 00 00 00 08 00 00 04 00 00 00", want: "5/24/00",
			data: zeros},
		{name: "physical block data", cdb: "41 04 00 00 00 08 00 04 00 00", want: "5/24/00",
			data: zeros},
		{name: "logical block data", cdb: "41 02 00 00 00 08 00 04 00 00", want: "5/24/00",
			data: zeros},
		{name: "protection", cdb: "41 20 00 00 00 08 00 04 00 00", want: "5/24/00", data: zeros},
		{name: "no blocks at the end", cdb: "41 00 00 00 4e 20 00 00 00 00", want: "5/21/00",
			data: zeros},
		{name: "too many blocks", cdb: "93 00 00 00 00 00 00 00 00 00 00 08 00 01 00 00",
			want: "5/21/00", data: zeros},
		{name: "beyond the end", cdb: "41 00 00 00 4e 1f 00 00 02 00", want: "5/21/00",
			data: zeros},
		{name: "half a block", cdb: "41 00 00 00 00 08 00 04 00 00", want: "5/0e/03",
			data: block[:256]},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			if c.plain {
				b = newBench(t, plainDisk)
				b.disk = b.d.nth(0).Disk.(*memDisk)
			}
			r := b.run(cdb(c.cdb), c.data)
			require.Equal(t, c.want, r.outcome())
			require.Equal(t, c.zero, b.disk.count("zero"))
			require.Equal(t, c.discard, b.disk.count("discard"))
			require.Equal(t, c.allocate, b.disk.allocated())
			if c.want == "GOOD" && c.data != nil {
				require.Equal(t, bytes.Repeat(c.data, 1024), b.read(8, 1024))
				require.Equal(t, zeros, b.read(1032, 1))
				require.Equal(t, zeros, b.read(7, 1))
			}
		})
	}
	for _, request := range []string{"41 00 00 00 4e 00 00 00 00 00",
		"93 00 00 00 00 00 00 00 4e 00 00 00 00 00 00 00"} {
		b := newBench(t)
		b.good(cdb(request), block)
		require.Equal(t, bytes.Repeat(block, testBlocks-0x4e00), b.read(0x4e00, testBlocks-0x4e00),
			"no blocks: up to the end")
		require.Equal(t, zeros, b.read(0x4dff, 1))
	}
	big := newBench(t, func(l *LUN) { l.Disk = newMemDisk(1 << 30) })
	require.Equal(t, "5/24/00", big.run(cdb("93 00 00 00 00 00 00 00 00 00 00 08 00 01 00 00"),
		zeros).outcome(), "more than MAXIMUM WRITE SAME LENGTH")
	require.Equal(t, "5/24/00", big.run(cdb("93 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"),
		zeros).outcome(), "and so is the rest of the disk")
}

func TestCompareAndWrite(t *testing.T) {
	old, fresh := pattern(3, 1), pattern(3, 100)
	wrong := bytes.Clone(old)
	wrong[2*BlockSize+5] ^= 0x80
	for _, c := range []struct {
		name, cdb, want string
		data            []byte
		written         bool
		flushes         int
	}{
		{name: "equal", cdb: "89 00 00 00 00 00 00 00 00 10 00 00 00 03 00 00", want: "GOOD",
			data: append(bytes.Clone(old), fresh...), written: true},
		{name: "equal, FUA", cdb: "89 18 00 00 00 00 00 00 00 10 00 00 00 03 00 00", want: "GOOD",
			data: append(bytes.Clone(old), fresh...), written: true, flushes: 1},
		{name: "different", cdb: "89 00 00 00 00 00 00 00 00 10 00 00 00 03 00 00", want: "e/1d/00",
			data: append(bytes.Clone(wrong), fresh...)},
		{name: "no blocks", cdb: "89 00 00 00 00 00 00 00 00 10 00 00 00 00 00 00", want: "GOOD"},
		{name: "too many", cdb: "89 00 00 00 00 00 00 00 00 10 00 00 00 81 00 00", want: "5/24/00"},
		{name: "beyond the end", cdb: "89 00 00 00 00 00 00 00 4e 1f 00 00 00 02 00 00",
			want: "5/21/00"},
		{name: "protection", cdb: "89 20 00 00 00 00 00 00 00 10 00 00 00 03 00 00",
			want: "5/24/00"},
		{name: "half the data", cdb: "89 00 00 00 00 00 00 00 00 10 00 00 00 03 00 00",
			want: "5/0e/03", data: old},
		{name: "no data", cdb: "89 00 00 00 00 00 00 00 00 10 00 00 00 03 00 00", want: "5/0e/03"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.write(16, old)
			r := b.run(cdb(c.cdb), c.data)
			require.Equal(t, c.want, r.outcome())
			want := old
			if c.written {
				want = fresh
			}
			require.Equal(t, want, b.read(16, 3))
			require.Equal(t, c.flushes, b.disk.count("flush"))
			if c.want == "e/1d/00" {
				requireHex(t, "f0 00 0e 00000405 0a 00000000 1d00 00 000000", r.sense)
			}
		})
	}
}

// TestOfferedData checks commands whose data must be exactly as long as the CDB says, or at least
// that long. A wrong amount of data is refused before its content is compared with the medium.
func TestOfferedData(t *testing.T) {
	for _, c := range []struct {
		name, cdb string
		offered   int64
	}{
		{"COMPARE AND WRITE", "89 00 00 00 00 00 00 00 00 10 00 00 00 01 00 00", 4 * BlockSize},
		{"COMPARE AND WRITE, a byte too much", "89 00 00 00 00 00 00 00 00 10 00 00 00 01 00 00",
			2*BlockSize + 1},
		{"COMPARE AND WRITE of 256 blocks", "89 00 00 00 00 00 00 00 00 10 00 00 00 00 00 00",
			512 * BlockSize},
		{"WRITE SAME", "41 00 00 00 00 08 00 04 00 00", 2 * BlockSize},
		{"WRITE SAME without data", "93 01 0000000000000008 00000004 00 00", BlockSize},
		{"WRITE ATOMIC(16)", "9c 00 0000000000000008 0000 0008 00 00", 9 * BlockSize},
		{"VERIFY", "8f 02 0000000000000008 00000004 00 00", 4*BlockSize - 1},
		{"VERIFY, some blocks", "2f 02 00000008 00 0004 00", 2 * BlockSize},
		{"VERIFY(12), a byte", "af 02 00000008 00000004 00 00", 1},
		{"VERIFY of one block repeated", "8f 06 0000000000000008 00000004 00 00", 10},
	} {
		b := newBench(t, stored)
		task := &Task{Nexus: b.nexus, LUN: lun1, Offered: c.offered}
		copy(task.CDB[:], cdb(c.cdb))
		_, sense := b.d.Outcome(task, b.d.Prepare(task), nil)
		want := "5/24/00" // too much
		if slices.Contains([]string{"2f", "8f", "af"}, c.cdb[:2]) {
			want = "5/0e/03"
		}
		require.Equal(t, want, result{sense: sense}.code(), c.name)
	}
}

func TestLBAStatus(t *testing.T) {
	b := newBench(t)
	b.write(16, pattern(9, 1)) // pages 2 and 3
	for _, c := range []struct{ name, cdb, want string }{
		{"deallocated at the start", "9e 12 00 00 00 00 00 00 00 00 00 00 00 18 00 00",
			"00000014 00000000 0000000000000000 00000010 01 000000"},
		{"mapped", "9e 12 00 00 00 00 00 00 00 10 00 00 00 18 00 00",
			"00000014 00000000 0000000000000010 00000010 00 000000"},
		{"in the midst", "9e 12 00 00 00 00 00 00 00 13 00 00 00 ff 00 00",
			"00000014 00000000 0000000000000013 0000000d 00 000000"},
		{"up to the end", "9e 12 00 00 00 00 00 00 4e 00 00 00 00 18 00 00",
			"00000014 00000000 0000000000004e00 00000020 01 000000"},
		{"cut off", "9e 12 00 00 00 00 00 00 00 10 00 00 00 08 00 00", "00000014 00000000"},
		{"no allocation", "9e 12 00 00 00 00 00 00 00 10 00 00 00 00 00 00", ""},
	} {
		t.Run(c.name, func(t *testing.T) { requireHex(t, c.want, b.good(cdb(c.cdb), nil)) })
	}
	require.Equal(t, "5/21/00", b.run(cdb("9e 12 00 00 00 00 00 00 4e 20 00 00 00 18 00 00"),
		nil).outcome())
	require.Equal(t, "5/21/00", b.run(cdb("9e 12 80 00 00 00 00 00 00 00 00 00 00 18 00 00"),
		nil).outcome())
	require.Equal(t, "5/24/00", newBench(t, plainDisk).run(cdb("9e 12 00 00 00 00 00 00 00 00 00 "+
		"00 00 18 00 00"), nil).outcome(), "a disk that cannot tell")
}

func TestReadWriteSizes(t *testing.T) {
	for _, c := range []struct{ name, write, read string }{
		{"6", "0a 00 00 64 10 00", "08 00 00 64 10 00"},
		{"10", "2a 00 00 00 00 64 00 00 10 00", "28 00 00 00 00 64 00 00 10 00"},
		{"12", "aa 00 00 00 00 64 00 00 00 10 00 00", "a8 00 00 00 00 64 00 00 00 10 00 00"},
		{"16", "8a 00 00 00 00 00 00 00 00 64 00 00 00 10 00 00",
			"88 00 00 00 00 00 00 00 00 64 00 00 00 10 00 00"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			data := pattern(16, 3)
			b.good(cdb(c.write), data)
			require.Equal(t, data, b.good(cdb(c.read), nil))
			require.Equal(t, 0, b.disk.count("flush"))
		})
	}
}

func TestReadWriteRange(t *testing.T) {
	for _, c := range []struct{ name, cdb, want string }{
		{"last block", "28 00 00 00 4e 1f 00 00 01 00", "GOOD"},
		{"first block beyond", "28 00 00 00 4e 20 00 00 01 00", "5/21/00"},
		{"reaches beyond", "28 00 00 00 4e 1f 00 00 02 00", "5/21/00"},
		{"nothing at the start", "28 00 00 00 00 00 00 00 00 00", "GOOD"},
		{"nothing at the end", "28 00 00 00 4e 20 00 00 00 00", "5/21/00"},
		{"nothing at the last address", "28 00 ff ff ff ff 00 00 00 00", "5/21/00"},
		{"sum overflows", "88 00 ff ff ff ff ff ff ff ff ff ff ff ff 00 00", "5/21/00"},
		{"write sum overflows", "8a 00 ff ff ff ff ff ff ff f0 00 00 00 20 00 00", "5/21/00"},
		{"16384 blocks", "88 00 00 00 00 00 00 00 00 00 00 00 40 00 00 00", "GOOD"},
		{"write protection information", "2a 20 00 00 00 00 00 00 01 00", "5/24/00"},
		{"DPO and FUA", "28 18 00 00 00 00 00 00 01 00", "GOOD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, newBench(t).run(cdb(c.cdb), nil).outcome())
		})
	}
}

func TestRead6OfZeroBlocksReads256(t *testing.T) {
	b := newBench(t)
	require.Len(t, b.good(cdb("08 00 00 00 00 00"), nil), 256*BlockSize)
}

func TestWriteForceUnitAccessFlushes(t *testing.T) {
	for name, c := range map[string]string{
		"WRITE(10)": "2a 08 00 00 00 00 00 00 01 00",
		"WRITE(12)": "aa 08 00 00 00 00 00 00 00 01 00 00",
		"WRITE(16)": "8a 08 00 00 00 00 00 00 00 00 00 00 00 01 00 00",
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			var calls []string
			b.disk.enter = func(method string) {
				if method != "read" {
					calls = append(calls, method)
				}
			}
			b.good(cdb(c), pattern(1, 1))
			require.Equal(t, []string{"write", "flush"}, calls)
		})
	}
}

// TestMaximumTransferLength reads as much as VPD page B0h allows, and a block more.
func TestMaximumTransferLength(t *testing.T) {
	b := newBench(t, func(l *LUN) { l.Disk = newMemDisk(1 << 30) })
	require.Equal(t, "GOOD", b.run(cdb("88 00 00 00 00 00 00 00 00 00 00 02 00 00 00 00"),
		nil).outcome())
	require.Equal(t, "5/24/00", b.run(cdb("88 00 00 00 00 00 00 00 00 00 00 02 00 01 00 00"),
		nil).outcome())
}

// unmapList makes an UNMAP parameter list of pairs of address and number of blocks.
func unmapList(pairs ...uint64) []byte {
	b := make([]byte, unmapHeaderLen)
	for i := 0; i < len(pairs); i += 2 {
		b = binary.BigEndian.AppendUint64(b, pairs[i])
		b = binary.BigEndian.AppendUint32(b, uint32(pairs[i+1]))
		b = binary.BigEndian.AppendUint32(b, 0)
	}
	binary.BigEndian.PutUint16(b[0:], uint16(len(b)-2))
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)-unmapHeaderLen))
	return b
}

func unmapCDB(n int) []byte { return []byte{opUnmap, 0, 0, 0, 0, 0, 0, byte(n >> 8), byte(n), 0} }

func TestUnmap(t *testing.T) {
	many := make([]uint64, 2*(maxUnmapRanges+1))
	for _, c := range []struct {
		name     string
		list     []byte
		want     string
		discards int
	}{
		{"one range", unmapList(0, 8), "GOOD", 1},
		{"two ranges", unmapList(0, 8, 16, 8), "GOOD", 2},
		{"no list", nil, "GOOD", 0},
		{"no ranges", unmapList(), "GOOD", 0},
		{"an empty range", unmapList(5, 0), "GOOD", 0},
		{"an empty range at the end", unmapList(testBlocks, 0), "GOOD", 0},
		{"an empty range beyond the end", unmapList(testBlocks+1, 0), "5/21/00", 0},
		{"everything", unmapList(0, testBlocks), "GOOD", 1},
		{"second range beyond the end", unmapList(0, 8, testBlocks-1, 2), "5/21/00", 0},
		{"sum overflows", unmapList(0, 8, ^uint64(0), 2), "5/21/00", 0},
		{"most ranges", unmapList(many[:2*maxUnmapRanges]...), "GOOD", 0},
		{"too many ranges", unmapList(many...), "5/26/00", 0},
		{"header cut off", make([]byte, 7), "5/1a/00", 0},
		{"ranges cut off", unmapList(0, 8, 16, 8)[:32], "5/1a/00", 0},
		{"more ranges than data", unhex("0006 0010 00000000 0000000000000000 00000008 00000000"),
			"5/26/00", 0},
		{"incomplete range is ignored",
			append(unhex("001e 0018 00000000"), unmapList(0, 8, 16, 8)[8:32]...), "GOOD", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.write(0, pattern(32, 4))
			require.Equal(t, c.want, b.run(unmapCDB(len(c.list)), c.list).outcome())
			require.Equal(t, c.discards, b.disk.count("discard"))
			if c.discards > 0 {
				require.Equal(t, make([]byte, 8*BlockSize), b.read(0, 8))
			} else {
				require.Equal(t, pattern(32, 4), b.read(0, 32))
			}
		})
	}
}

func TestUnmapCDB(t *testing.T) {
	b := newBench(t)
	require.Equal(t, "5/24/00",
		b.run(cdb("42 01 00 00 00 00 00 00 18 00"), unmapList(0, 8)).outcome(), "anchor")
	require.Equal(t, "5/0e/03", b.run(unmapCDB(24), unmapList()).outcome(),
		"initiator sends less than the list")
	require.Equal(t, "5/20/00", newBench(t, plainDisk).run(unmapCDB(24), unmapList(0, 8)).outcome(),
		"a disk that cannot discard")
	big := newBench(t, func(l *LUN) { l.Disk = thinDisk{newMemDisk(1 << 40)} })
	require.Equal(t, "GOOD", big.run(unmapCDB(24), unmapList(0, maxUnmap/BlockSize)).outcome())
	require.Equal(t, "5/26/00",
		big.run(unmapCDB(40), unmapList(0, maxUnmap/BlockSize, 1<<24, 1)).outcome(),
		"more than MAXIMUM UNMAP LBA COUNT")
}

func FuzzUnmap(f *testing.F) {
	f.Add(unmapList())
	f.Add(unmapList(0, 8, 16, 8))
	f.Add(unmapList(testBlocks, 1))
	f.Add(unhex("ffff ffff 00000000"))
	f.Fuzz(func(t *testing.T, list []byte) {
		if len(list) < unmapHeaderLen {
			list = append(list, make([]byte, unmapHeaderLen-len(list))...)
		}
		ranges, err := parseUnmap(list)
		if err != nil {
			require.Nil(t, ranges)
			return
		}
		require.LessOrEqual(t, len(ranges), maxUnmapRanges)
		require.LessOrEqual(t, unmapHeaderLen+unmapDescriptorLen*len(ranges), len(list))
	})
}
