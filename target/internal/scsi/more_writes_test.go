package scsi

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// forgetfulDisk changes a byte of each write.
type forgetfulDisk struct{ *memDisk }

func (d forgetfulDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	p = bytes.Clone(p)
	p[len(p)-3] ^= 1
	return d.memDisk.WriteAt(ctx, p, off)
}

func TestWriteAndVerify(t *testing.T) {
	data := pattern(40, 3)
	for _, c := range []struct {
		name, cdb, want string
		forgetful       bool
		data            []byte
	}{
		{"10", "2e 00 00 00 00 08 00 00 28 00", "GOOD", false, data},
		{"12", "ae 00 00 00 00 08 00 00 00 28 00 00", "GOOD", false, data},
		{"16", "8e 00 00 00 00 00 00 00 00 08 00 00 00 28 00 00", "GOOD", false, data},
		{"10, compare, DPO", "2e 12 00 00 00 08 00 00 28 00", "GOOD", false, data},
		{"10, medium lost something", "2e 00 00 00 00 08 00 00 28 00", "GOOD", true, data},
		{"10, compare, medium lost something", "2e 02 00 00 00 08 00 00 28 00", "e/1d/00", true,
			data},
		{"10, reserved BYTCHK", "2e 04 00 00 00 08 00 00 28 00", "5/24/00", false, nil},
		{"10, repeated block", "2e 06 00 00 00 08 00 00 28 00", "5/24/00", false, nil},
		{"10, protection", "2e 20 00 00 00 08 00 00 28 00", "5/24/00", false, nil},
		{"10, beyond the end", "2e 00 00 00 4e 1f 00 00 02 00", "5/21/00", false, nil},
		{"10, nothing", "2e 00 00 00 00 08 00 00 00 00", "GOOD", false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, func(l *LUN) {
				if c.forgetful {
					l.Disk = forgetfulDisk{l.Disk.(thinDisk).memDisk}
				}
			})
			r := b.run(cdb(c.cdb), c.data)
			require.Equal(t, c.want, r.outcome())
			switch {
			case c.want == "e/1d/00":
				require.Equal(t, unhex("00001ffd"), r.sense[3:7],
					"third last byte of the first chunk")
			case c.want == "GOOD" && c.data != nil && !c.forgetful:
				require.Equal(t, data, b.read(8, 40))
				require.Equal(t, 1, b.disk.count("flush"))
			}
		})
	}
}

func TestPrefetch(t *testing.T) {
	for _, c := range []struct {
		name, cdb, want string
		reads           int
	}{
		{"10", "34 00 00 00 00 00 00 04 00 00", "GOOD", 2},
		{"10, group", "34 00 00 00 00 00 03 00 01 00", "GOOD", 1},
		{"10, to the end", "34 00 00 00 4e 00 00 00 00 00", "GOOD", 1},
		{"10, immediately", "34 02 00 00 00 00 00 04 00 00", "GOOD", 0},
		{"16", "90 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00", "GOOD", 1},
		{"16, group", "90 00 00 00 00 00 00 00 00 00 00 00 00 01 1f 00", "GOOD", 1},
		{"16, beyond the end", "90 00 00 00 00 00 00 00 4e 1f 00 00 00 02 00 00", "5/21/00", 0},
		{"10, nothing beyond the end", "34 00 00 00 4e 21 00 00 00 00", "5/21/00", 0},
		{"10, reserved bit", "34 01 00 00 00 00 00 00 01 00", "5/24/00", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			require.Equal(t, c.want, b.run(cdb(c.cdb), nil).outcome())
			require.Equal(t, c.reads, b.disk.count("read"))
		})
	}
	big := newBench(t, func(l *LUN) {
		m := newMemDisk(1 << 40)
		l.Disk = m
	})
	big.good(cdb("90 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"), nil)
	require.Equal(t, maxTransfer/scratchSize,
		big.d.nth(0).Disk.(*memDisk).count("read"), "one command does not read a whole disk")
}
