package scsi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
)

const longBlock = disk.LongBlock

func longBlocks(l *LUN) { l.BlockSize = longBlock }

// TestLongBlocks: every command counts in blocks of 4096 bytes on a unit that has those.
func TestLongBlocks(t *testing.T) {
	b := newBench(t, longBlocks, stored)
	const blocks = testBlocks * BlockSize / longBlock
	be := binary.BigEndian
	capacity := b.good(cdb("25 00 00000000 00 00 00 00"), nil)
	require.Equal(t, uint32(blocks-1), be.Uint32(capacity))
	require.Equal(t, uint32(longBlock), be.Uint32(capacity[4:]))
	capacity = b.good(cdb("9e 10 0000000000000000 00000020 00 00"), nil)
	require.Equal(t, uint64(blocks-1), be.Uint64(capacity))
	require.Equal(t, uint32(longBlock), be.Uint32(capacity[8:]))
	require.Zero(t, capacity[13], "a physical block is a logical one")
	mode := b.good(cdb("1a 00 3f 00 ff 00"), nil)
	require.Equal(t, []byte{0, 0, 0x10, 0}, mode[8:12])
	limits := b.good(cdb("12 01 b0 00 ff 00"), nil)
	require.Equal(t, byte(16), limits[5], "COMPARE AND WRITE")
	require.Equal(t, uint16(1), be.Uint16(limits[6:]), "granularity")
	require.Equal(t, uint32(64<<20/longBlock), be.Uint32(limits[8:]), "transfer")
	require.Equal(t, uint32(512<<20/longBlock), be.Uint32(limits[20:]), "UNMAP")
	require.Equal(t, uint32(1), be.Uint32(limits[28:]), "granularity of UNMAP")
	require.Equal(t, uint32(128<<10/longBlock), be.Uint32(limits[44:]), "WRITE ATOMIC")

	at := func(lba int) []byte {
		t.Helper()
		p := make([]byte, longBlock)
		_, err := b.disk.content.ReadAt(t.Context(), p, int64(lba)*longBlock)
		require.NoError(t, err)
		require.Equal(t, p, b.good(unhexf("28 00 %08x 00 0001 00", lba), nil))
		return p
	}
	one, two, zero := pattern(8, 1), pattern(8, 2), make([]byte, longBlock)
	b.good(cdb("2a 00 00000003 00 0002 00"), append(bytes.Clone(one), two...))
	require.Equal(t, one, at(3))
	require.Equal(t, two, at(4))
	require.Equal(t, "5/21/00", b.run(unhexf("28 00 %08x 00 0001 00", blocks), nil).outcome())
	at(blocks - 1)

	status := b.good(cdb("9e 12 0000000000000003 00000018 00 00"), nil)
	require.Equal(t, uint32(2), be.Uint32(status[16:]))
	require.Equal(t, byte(statusMapped), status[20])
	b.good(cdb("2f 06 00000003 00 0001 00"), one) // VERIFY with BYTCHK 3
	require.Equal(t, "e/1d/00", b.run(cdb("2f 06 00000003 00 0002 00"), one).outcome())
	b.good(cdb("89 00 0000000000000003 000000 01 00 00"), append(bytes.Clone(one), two...))
	require.Equal(t, two, at(3))
	require.Equal(t, "5/24/00", b.run(cdb("89 00 0000000000000003 000000 11 00 00"),
		make([]byte, 2*17*longBlock)).outcome())
	b.good(unmapCDB(24), unmapList(3, 1))
	require.Equal(t, zero, at(3))
	require.Equal(t, two, at(4))
	b.good(cdb("93 00 0000000000000005 00000003 00 00"), one)
	require.Equal(t, one, at(7))
	require.Equal(t, zero, at(8))
	b.good(cdb("93 01 0000000000000006 00000001 00 00"), nil)
	require.Equal(t, zero, at(6))
	b.good(cdb("9c 00 0000000000000009 0000 0001 00 00"), two)
	require.Equal(t, two, at(9))
	require.Equal(t, "5/24/00", b.run(cdb("9c 00 0000000000000009 0000 0021 00 00"),
		make([]byte, 33*longBlock)).outcome(), "more than 128 KiB")

	// An error names the block, not one of 512 bytes.
	b.disk.failWith("read", &disk.MediumError{Op: "read", Off: 9 * longBlock, Length: 1,
		Err: errors.New("worn out")})
	r := b.run(cdb("28 00 00000009 00 0001 00"), nil)
	require.Equal(t, "3/11/00", r.outcome())
	require.Equal(t, uint32(9), be.Uint32(r.sense[3:]))
	b.disk.failWith("read", nil)

	// A transfer that ends within a block keeps the rest of it.
	require.Equal(t, "GOOD", drive(b.d, b.nexus, lun1, cdb("2a 00 00000007 00 0001 00"),
		two[:1000], 8192).outcome())
	require.Equal(t, append(bytes.Clone(two[:1000]), one[1000:]...), at(7))
}

// TestCopyOfLongBlocks: EXTENDED COPY counts in the blocks of both units, which are of one length.
func TestCopyOfLongBlocks(t *testing.T) {
	long := func(descriptor string) string {
		return strings.Replace(descriptor, "000200", "001000", 1)
	}
	one := pattern(16, 1)
	b := newCopyBench(t, first(longBlocks), second(longBlocks))
	b.good(cdb("2a 00 00000001 00 0002 00"), one)
	targets := []string{long(ownNAA), long(otherNAA)}
	list := copyParameters(1, 0, targets, block(0, 1, 2, 1, 5))
	require.Equal(t, "GOOD", b.copy(list).outcome())
	require.Equal(t, one, b.read2(5*8, 16))
	require.Equal(t, "5/26/00", b.copy(copyParameters(1, 0, both, block(0, 1, 2, 1, 5))).outcome(),
		"the initiator assumes blocks of 512 bytes")

	b = newCopyBench(t, second(longBlocks))
	b.good(cdb("2a 00 00000008 00 0010 00"), one)
	list = copyParameters(1, 0, []string{ownNAA, long(otherNAA)}, block(0, 1, 2, 1, 5))
	require.Equal(t, "a/0d/03", b.copy(list).outcome())
	require.Equal(t, make([]byte, len(one)), b.read2(5*8, 16))
}
