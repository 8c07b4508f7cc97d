package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

func newLUNs(t *testing.T, numbers ...uint16) (*Device, *Nexus) {
	t.Helper()
	var luns []LUN
	for _, n := range numbers {
		l := LUN{Number: n, Disk: newMemDisk(1 << 20), Identity: testIdentity(),
			Access: AccessWriteShared}
		l.Identity.NAA[7] = byte(n)
		luns = append(luns, l)
	}
	d := testtool.Must(NewDevice(Options{}, luns))(t)
	n := d.Attach(InitiatorPort{Name: "iqn.a"})
	n.forgetAttentions()
	return d, n
}

func TestReportLUNs(t *testing.T) {
	d, n := newLUNs(t, 300, 2, 1)
	for _, c := range []struct {
		name, cdb, want, data string
		lun                   uint64
	}{
		{"at LUN 0 without a disk", "a0 00 00 00 00 00 00 00 01 00 00 00", "GOOD",
			"00000018 00000000 0001000000000000 0002000000000000 412c000000000000", 0},
		{"at LUN 1", "a0 00 02 00 00 00 00 00 01 00 00 00", "GOOD",
			"00000018 00000000 0001000000000000 0002000000000000 412c000000000000", lun1},
		{"cut off", "a0 00 00 00 00 00 00 00 00 10 00 00", "GOOD",
			"00000018 00000000 0001000000000000", 0},
		{"well-known", "a0 00 01 00 00 00 00 00 01 00 00 00", "GOOD", "00000000 00000000", 0},
		{"short allocation", "a0 00 00 00 00 00 00 00 00 0f 00 00", "5/24/00", "", 0},
		{"unknown selection", "a0 00 03 00 00 00 00 00 01 00 00 00", "5/24/00", "", 0},
		{"LUN without a disk", "a0 00 00 00 00 00 00 00 01 00 00 00", "5/25/00", "", 5 << 48},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := drive(d, n, c.lun, cdb(c.cdb), nil, 4096)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.data, r.data)
		})
	}
}

func TestLUNAddressing(t *testing.T) {
	d, n := newLUNs(t, 1, 300)
	ready := make([]byte, 6)
	for _, c := range []struct {
		name string
		lun  uint64
		want string
	}{
		{"peripheral", 0x0001 << 48, "GOOD"},
		{"flat space", 0x412c << 48, "GOOD"},
		{"flat space of a small number", 0x4001 << 48, "GOOD"},
		{"peripheral on another bus", 0x0101 << 48, "5/25/00"},
		{"second level", 0x0001<<48 | 1<<32, "5/25/00"},
		{"last level", 0x0001<<48 | 1, "5/25/00"},
		{"logical unit addressing", 0x8001 << 48, "5/25/00"},
		{"REPORT LUNS well-known logical unit", 0xc101 << 48, "5/25/00"},
		{"no such number", 0x0002 << 48, "5/25/00"},
		{"LUN 0", 0, "5/25/00"},
		{"highest", 0x7fff << 48, "5/25/00"},
	} {
		require.Equal(t, c.want, drive(d, n, c.lun, ready, nil, 4096).outcome(), c.name)
		require.Equal(t, c.want == "GOOD", d.LUNExists(c.lun), c.name)
	}
	for _, number := range []uint16{0, 1, 255, 256, serving.MaxNumber} {
		got, ok := decodeLUN(EncodeLUN(number))
		require.True(t, ok)
		require.Equal(t, number, got)
	}
}

// TestLUNZeroWithoutDisk checks that LUN 0 answers the commands of a LUN scan, and nothing else.
func TestLUNZeroWithoutDisk(t *testing.T) {
	d, n := newLUNs(t, 1)
	run := func(s string) result { return drive(d, n, 0, cdb(s), nil, 4096) }
	require.Equal(t, "GOOD", run("12 00 00 00 24 00").outcome())
	require.Equal(t, "5/24/00", run("12 00 01 00 24 00").outcome())
	requireHex(t, "70 00 05 00000000 0a 00000000 2500 00 000000", run("03 00 00 00 ff 00").data)
	for _, s := range []string{"00 00 00 00 00 00", "28 00 00 00 00 00 00 00 01 00",
		"25 00 00 00 00 00 00 00 00 00", "a3 0c 00 00 00 00 00 00 01 00 00 00", "ff 00"} {
		require.Equal(t, "5/25/00", run(s).outcome(), s)
	}
}

func TestLUNZeroWithDisk(t *testing.T) {
	d, n := newLUNs(t, 0, 1)
	require.Equal(t, "GOOD", drive(d, n, 0, make([]byte, 6), nil, 4096).outcome())
	requireHex(t, "00000010 00000000 0000000000000000 0001000000000000",
		drive(d, n, 0, cdb("a0 00 00 00 00 00 00 00 01 00 00 00"), nil, 4096).data)
	require.EqualValues(t, 0, drive(d, n, 0, cdb("12 00 00 00 24 00"), nil, 4096).data[0])
}

func TestNewDeviceRefuses(t *testing.T) {
	good := func() LUN {
		return LUN{Number: 1, Disk: newMemDisk(1 << 20), Identity: testIdentity()}
	}
	for _, c := range []struct {
		change func(*LUN)
		want   string
	}{
		{func(l *LUN) { l.Number = serving.MaxNumber + 1 }, "LUN 16384: a number is at most 16383"},
		{func(l *LUN) { l.Disk = nil }, "LUN 1: has no disk"},
		{func(l *LUN) { l.Disk = newMemDisk(1000) },
			"LUN 1: disk size 1000 is not a positive multiple of 512"},
		{func(l *LUN) { l.Disk = newMemDisk(0) },
			"LUN 1: disk size 0 is not a positive multiple of 512"},
		{func(l *LUN) { l.Identity.Serial = "" },
			`LUN 1: serial "" must be 1 to 36 printable ASCII characters`},
		{func(l *LUN) { l.Identity.Serial = "a\nb" },
			`LUN 1: serial "a\nb" must be 1 to 36 printable ASCII characters`},
		{func(l *LUN) { l.Identity.NAA[0] = 0x60 },
			"LUN 1: NAA identifier 6011223344556677 does not begin with 3 (locally assigned)"},
		{func(l *LUN) { l.Access = "mine" },
			`LUN 1: access mode "mine" is unknown; use write-exclusive, write-shared or read-shared`},
	} {
		l := good()
		c.change(&l)
		require.EqualError(t, testtool.Err(NewDevice(Options{}, []LUN{l})), c.want)
	}
	_, err := NewDevice(Options{}, []LUN{good(), good()})
	require.EqualError(t, err, "LUN 1 is given to two disks; give each a number of its own")
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
