package scsi

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

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
