package scsi

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The CSCD descriptors of the logical units of the tests, and of one that is not there.
const (
	ownNAA     = "e4 00 0000 01 03 00 08 3011223344556677 000000000000000000000000 00 000200"
	otherNAA   = "e4 00 0000 01 03 00 08 3011223344556688 000000000000000000000000 00 000200"
	unknownNAA = "e4 00 0000 01 03 00 08 3011223344556699 000000000000000000000000 00 000200"
)

// block is a block device to block device segment descriptor.
func block(source, dest uint16, blocks uint16, from, to uint64) string {
	return fmt.Sprintf("02 00 0018 %04x %04x 0000 %04x %016x %016x", source, dest, blocks, from, to)
}

// copyParameters is a parameter list of EXTENDED COPY.
func copyParameters(id, usage byte, targets []string, segments ...string) []byte {
	t, s := unhex(strings.Join(targets, "")), unhex(strings.Join(segments, ""))
	b := make([]byte, copyHeaderLen)
	b[0], b[1] = id, usage<<3
	binary.BigEndian.PutUint16(b[2:], uint16(len(t)))
	binary.BigEndian.PutUint32(b[8:], uint32(len(s)))
	return append(append(b, t...), s...)
}

// extendedCopy is the CDB for a parameter list.
func extendedCopy(list []byte) []byte {
	b := make([]byte, 16)
	b[0] = opExtendedCopy
	binary.BigEndian.PutUint32(b[10:], uint32(len(list)))
	return b
}

func repeat(s string, n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = s
	}
	return list
}

// TestCopyListRefused sends parameter lists that are refused before anything is copied: no sense
// key COPY ABORTED, and no residual.
func TestCopyListRefused(t *testing.T) {
	change := func(at int, value byte) []byte {
		p := copyParameters(1, 0, []string{ownNAA}, block(0, 0, 8, 0, 100))
		p[at] = value
		return p
	}
	whole := change(0, 1)
	one := block(0, 0, 8, 0, 100)
	for _, c := range []struct {
		name, want, sks string
		list            []byte
	}{
		{"shorter than a header", "5/1a/00", "000000", whole[:15]},
		{"ends within a CSCD descriptor", "5/1a/00", "000000", whole[:16+31]},
		{"ends within a segment descriptor", "5/1a/00", "000000", whole[:len(whole)-1]},
		{"descriptors are too long together", "5/1a/00", "000000",
			copyParameters(1, 0, repeat(ownNAA, 9), repeat(one, 64)...)},
		{"length of segment descriptors is huge", "5/1a/00", "000000", change(8, 0xff)},
		{"inline data", "5/26/0b", "8f000c", change(15, 1)},
		{"reserved bit of the header", "5/26/00", "8f0001", change(1, 0x80)},
		{"reserved LIST ID USAGE", "5/26/00", "8c0001", change(1, 0x08)},
		{"list identifier that is not to be used", "5/26/00", "8f0000", change(1, 0x18)},
		{"too many CSCD descriptors", "5/26/06", "8f0002",
			copyParameters(1, 0, repeat(ownNAA, 9), one)},
		{"too many segment descriptors", "5/26/08", "8f0008",
			copyParameters(1, 0, []string{ownNAA}, repeat(one, 65)...)},
		{"no whole number of CSCD descriptors", "5/26/00", "8f0002",
			copyParameters(1, 0, []string{ownNAA, "e4"}, one)},
		{"no whole number of segment descriptors", "5/26/00", "8f0008",
			copyParameters(1, 0, []string{ownNAA}, one, "02")},
		{"type of CSCD descriptor", "5/26/07", "8f0010", change(16, 0xe0)},
		{"type of the second CSCD descriptor", "5/26/07", "8f0030",
			copyParameters(1, 0, []string{ownNAA, "ff" + ownNAA[2:]}, one)},
		{"type of segment descriptor", "5/26/09", "8f0030", change(48, 0x03)},
		{"type of segment descriptor in place of a CSCD descriptor", "5/26/07", "8f0010",
			change(16, 0x02)},
		{"length of segment descriptor", "5/26/00", "8f0032", change(51, 0x14)},
		{"reserved bit of a segment descriptor", "5/26/00", "8c0031", change(49, 0x10)},
		{"association with a port", "5/26/00", "8d0015", change(21, 0x13)},
		{"designator beyond its field", "5/26/00", "8f0017", change(23, 21)},
		{"block length", "5/26/00", "8f002d", change(46, 0x10)},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newCopyBench(t)
			b.write(0, pattern(8, 1))
			r := drive(b.d, b.nexus, lun1, extendedCopy(c.list), c.list, 1<<20)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.sks, r.sense[15:18])
			requireHex(t, "00000000", r.sense[8:12])
			require.Zero(t, r.sense[0]&0x80)
			require.Equal(t, make([]byte, 8*BlockSize), b.read(100, 8))
			require.Equal(t, "5/24/00", b.run(receiveCopy(saCopyStatus, 1), nil).outcome(),
				"no copy has begun")
		})
	}
}

func TestCopyListAccepted(t *testing.T) {
	list := func(at int, value byte) []byte {
		p := copyParameters(1, 0, []string{ownNAA}, block(0, 0, 8, 0, 100))
		p[at] = value
		return p
	}
	for _, c := range []struct {
		name   string
		list   []byte
		copies bool
	}{
		{"no descriptors", copyParameters(1, 0, nil), false},
		{"no parameter list", nil, false},
		{"CSCD descriptors only", copyParameters(1, 0, []string{ownNAA, unknownNAA}), false},
		{"no blocks", copyParameters(1, 0, []string{ownNAA}, block(0, 0, 0, 0, 100)), false},
		{"as many descriptors as there may be",
			copyParameters(1, 0, append(repeat(unknownNAA, 7), ownNAA),
				repeat(block(7, 7, 8, 0, 100), 64)...), true},
		{"STR and priority", list(1, 0x27), true},
		{"LIST ID USAGE: discard", list(1, 0x10), true},
		{"LIST ID USAGE: none", copyParameters(0, 3, []string{ownNAA}, block(0, 0, 8, 0, 100)),
			true},
		{"LU ID TYPE has no meaning in this descriptor", list(17, 0xc0), true},
		{"relative initiator port", list(19, 7), true},
		{"DC and CAT", list(49, 3), true},
		{"unit that the command was sent to",
			copyParameters(1, 0, nil, block(0xffff, 0xffff, 8, 0, 100)), true},
		{"more bytes than descriptors", append(list(0, 1), 1, 2, 3), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newCopyBench(t)
			want := pattern(8, 1)
			b.write(0, want)
			b.good(extendedCopy(c.list), c.list)
			if !c.copies {
				want = make([]byte, len(want))
			}
			require.Equal(t, want, b.read(100, 8))
		})
	}
}

func FuzzCopyList(f *testing.F) {
	f.Add(copyParameters(1, 0, []string{ownNAA, otherNAA}, block(0, 1, 8, 0, 100),
		block(0xffff, 0, 65535, 1, 1<<40)))
	f.Add(copyParameters(0, 3, repeat(ownNAA, 8), repeat(block(0, 0, 1, 0, 1), 64)...))
	f.Add(copyParameters(9, 2, repeat(ownNAA, 9), repeat(block(0, 0, 1, 0, 1), 65)...))
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < copyHeaderLen {
			return
		}
		list, err := parseCopyList(p)
		if err != nil {
			var sense *senseError
			require.ErrorAs(t, err, &sense)
			require.Equal(t, IllegalRequest, sense.key)
			return
		}
		require.LessOrEqual(t, len(list.targets), maxCopyTargets)
		require.LessOrEqual(t, len(list.segments), maxCopySegments)
		require.Equal(t, int(binary.BigEndian.Uint16(p[2:])), copyTargetLen*len(list.targets))
		require.Equal(t, int(binary.BigEndian.Uint32(p[8:])), copySegmentLen*len(list.segments))
		// Encoding the parsed list gives the same list.
		targets, segments := make([]string, len(list.targets)), make([]string, len(list.segments))
		for i, target := range list.targets {
			at := copyHeaderLen + copyTargetLen*i
			targets[i] = fmt.Sprintf("%x", p[at:at+copyTargetLen])
			require.Equal(t, target.isNAA,
				target.naa != [8]byte{} || p[at+7] == 8 && p[at+4]&0xf == 1 && p[at+5]&0xf == 3)
		}
		for i, s := range list.segments {
			segments[i] = block(s.source, s.dest, uint16(s.blocks), s.from, s.to)
		}
		usage := p[1] >> 3 & 3
		again, err := parseCopyList(copyParameters(list.id, usage, targets, segments...))
		require.NoError(t, err)
		require.Equal(t, list, again)
	})
}
