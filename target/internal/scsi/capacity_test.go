package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadCapacity(t *testing.T) {
	huge := func(l *LUN) { l.Disk = newMemDisk(1 << 42) }
	thin := func(*LUN) {}
	for _, c := range []struct {
		name, cdb, want string
		change          func(*LUN)
	}{
		{"10", "25 00 00 00 00 00 00 00 00 00", "00004e1f 00000200", thin},
		{"10, too large for it", "25 00 00 00 00 00 00 00 00 00", "ffffffff 00000200", huge},
		{"16", "9e 10 00 00 00 00 00 00 00 00 00 00 00 20 00 00",
			"0000000000004e1f 00000200 00 03 c000 00000000000000000000000000000000", thin},
		{"16, cut off", "9e 10 00 00 00 00 00 00 00 00 00 00 00 0c 00 00",
			"0000000000004e1f 00000200", thin},
		{"16, without discard", "9e 10 00 00 00 00 00 00 00 00 00 00 00 20 00 00",
			"00000001ffffffff 00000200 00 03 0000 00000000000000000000000000000000", huge},
	} {
		t.Run(c.name, func(t *testing.T) {
			requireHex(t, c.want, newBench(t, c.change).good(cdb(c.cdb), nil))
		})
	}
	b := newBench(t)
	for name, c := range map[string]string{
		"10 with an address":       "25 00 00 00 00 01 00 00 00 00",
		"10 with PMI":              "25 00 00 00 00 00 00 00 01 00",
		"16 with an address":       "9e 10 00 00 00 00 00 00 00 01 00 00 00 20 00 00",
		"16 with PMI":              "9e 10 00 00 00 00 00 00 00 00 00 00 00 20 01 00",
		"unknown service action":   "9e 11 00 00 00 00 00 00 00 00 00 00 00 20 00 00",
		"reserved bit in byte one": "9e 30 00 00 00 00 00 00 00 00 00 00 00 20 00 00",
	} {
		require.Equal(t, "5/24/00", b.run(cdb(c), nil).outcome(), name)
	}
}
