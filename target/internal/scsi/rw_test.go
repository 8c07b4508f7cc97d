package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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
		{"protection information", "28 20 00 00 00 00 00 00 01 00", "5/24/00"},
		{"write protection information", "2a 20 00 00 00 00 00 00 01 00", "5/24/00"},
		{"DPO and FUA", "28 18 00 00 00 00 00 00 01 00", "GOOD"},
		{"RARC", "28 04 00 00 00 00 00 00 01 00", "5/24/00"},
		{"group number", "28 00 00 00 00 00 01 00 01 00", "5/24/00"},
		{"NACA", "28 00 00 00 00 00 00 00 01 04", "5/24/00"},
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

func TestFieldPointerNamesTheBit(t *testing.T) {
	r := newBench(t).run(cdb("28 20 00 00 00 00 00 00 01 00"), nil)
	require.Equal(t, unhex("70 00 05 00000000 0a 00000000 2400 00 cd 0001"), r.sense)
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
