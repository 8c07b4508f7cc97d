package scsi

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLogSense(t *testing.T) {
	const page = "0c 00 0018 0001 03 08 00001400 02 000000 0002 03 08 00000003 01 000000"
	for _, c := range []struct {
		name, cdb, want, data string
		change                func(*LUN)
	}{
		{"supported pages", "4d 00 40 00 00 00 00 00 ff 00", "GOOD", "00 00 0002 00 0c", accounted},
		{"supported pages of a disk that does not account", "4d 00 40 00 00 00 00 00 ff 00", "GOOD",
			"00 00 0001 00", plainDisk},
		{"supported pages, any control", "4d 00 00 00 00 00 00 00 ff 00", "GOOD",
			"00 00 0002 00 0c", accounted},
		{"supported subpages", "4d 00 40 ff 00 00 00 00 ff 00", "GOOD",
			"40 ff 0006 00 00 00 ff 0c 00", accounted},
		{"supported subpages of a disk that does not account", "4d 00 40 ff 00 00 00 00 ff 00",
			"GOOD", "40 ff 0004 00 00 00 ff", plainDisk},
		{"provisioning", "4d 00 4c 00 00 00 00 00 ff 00", "GOOD", page, accounted},
		{"provisioning, from a parameter on", "4d 00 4c 00 00 00 02 00 ff 00", "GOOD",
			"0c 00 000c 0002 03 08 00000003 01 000000", accounted},
		{"cut off within a parameter", "4d 00 4c 00 00 00 00 00 0b 00", "GOOD",
			"0c 00 0018 0001 03 08 000014", accounted},
		{"cut off within the header", "4d 00 4c 00 00 00 00 00 03 00", "GOOD", "0c 00 00",
			accounted},
		{"no allocation", "4d 00 4c 00 00 00 00 00 00 00", "GOOD", "", accounted},
		{"beyond the last parameter", "4d 00 4c 00 00 00 03 00 ff 00", "5/24/00", "", accounted},
		{"a parameter of the list of pages", "4d 00 40 00 00 00 01 00 ff 00", "5/24/00", "",
			accounted},
		{"thresholds", "4d 00 0c 00 00 00 00 00 ff 00", "5/24/00", "", accounted},
		{"defaults", "4d 00 cc 00 00 00 00 00 ff 00", "5/24/00", "", accounted},
		{"unknown page", "4d 00 4d 00 00 00 00 00 ff 00", "5/24/00", "", accounted},
		{"unknown subpage", "4d 00 4c 01 00 00 00 00 ff 00", "5/24/00", "", accounted},
		{"unknown subpage of the list", "4d 00 40 01 00 00 00 00 ff 00", "5/24/00", "", accounted},
		{"provisioning of a disk that does not account", "4d 00 4c 00 00 00 00 00 ff 00", "5/24/00",
			"", plainDisk},
		{"save", "4d 01 4c 00 00 00 00 00 ff 00", "5/24/00", "", accounted},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, c.change)
			// 2.5 MiB: three sets.
			for i := range 5 {
				b.good([]byte{0x2a, 0, 0, 0, byte(i << 2), 0, 0, 4, 0, 0}, pattern(1024, 1))
			}
			r := b.run(cdb(c.cdb), nil)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.data, r.data)
		})
	}
	b := newBench(t, accounted)
	b.disk.failWith("usage", errors.New("stat fails"))
	require.Equal(t, "4/44/00", b.run(cdb("4d 00 4c 00 00 00 00 00 ff 00"), nil).outcome())
}

func TestReportTargetPortGroups(t *testing.T) {
	b := newBench(t)
	const group = "00 01 0001 00 00 00 01 0000 0001"
	for _, c := range []struct{ name, cdb, want, data string }{
		{"length only", "a3 0a 00 00 00 00 00 00 01 00 00 00", "GOOD", "0000000c" + group},
		{"extended", "a3 2a 00 00 00 00 00 00 01 00 00 00", "GOOD", "00000010 10 00 0000" + group},
		{"cut off", "a3 0a 00 00 00 00 00 00 00 06 00 00", "GOOD", "0000000c 00 01"},
		{"no allocation", "a3 0a 00 00 00 00 00 00 00 00 00 00", "GOOD", ""},
		{"unknown format", "a3 4a 00 00 00 00 00 00 01 00 00 00", "5/24/00", ""},
		{"reserved byte", "a3 0a 01 00 00 00 00 00 01 00 00 00", "5/24/00", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := b.run(cdb(c.cdb), nil)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.data, r.data)
		})
	}
	require.EqualValues(t, 0x10, b.good(cdb("12 00 00 00 ff 00"), nil)[5]&0x30,
		"TPGS says that the command is there")
	require.Zero(t, b.runAs(b.nexus, 0, cdb("12 00 00 00 ff 00"), nil).data[5],
		"and where there is no unit, it is not")
}
