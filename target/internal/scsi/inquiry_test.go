package scsi

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// requireHex compares data with its hexadecimal form, in which spaces and line breaks do not
// matter.
func requireHex(t *testing.T, want string, got []byte) {
	t.Helper()
	require.Equal(t, hex.Dump(unhex(want)), hex.Dump(got))
}

func TestStandardInquiry(t *testing.T) {
	const rest = `
		4b55424556495254 4449534b202020202020202020202020 31202020
		0000000000000000000000000000000000000000 0000
		00a0 0460 04c0 0960 0000000000000000
		00000000000000000000000000000000000000000000`
	b := newBench(t)
	requireHex(t, "00 00 06 12 5b 18 00 02"+rest, b.good(cdb("12 00 00 00 ff 00"), nil))
	// With the LUN where SCSI-2 had it, as Linux sends it.
	requireHex(t, "00 00 06 12 5b 18 00 02"+rest, b.good(cdb("12 20 00 00 ff 00"), nil))
	require.Equal(t, "5/24/00", b.run(cdb("12 22 00 00 ff 00"), nil).outcome())

	for level, want := range map[int]string{0: "0960", 1: "0961", 2: "0962"} {
		b.nexus.SetProtocolLevel(level)
		requireHex(t, want, b.good(cdb("12 00 00 00 ff 00"), nil)[64:66])
	}
	b.nexus.SetProtocolLevel(0)

	vacant := b.runAs(b.nexus, 0, cdb("12 00 00 00 ff 00"), nil)
	requireHex(t, "3f 00 06 12 5b 00 00 02"+rest, vacant.data)
	unknown := b.runAs(b.nexus, 7<<48, cdb("12 00 00 00 ff 00"), nil)
	requireHex(t, "7f 00 06 12 5b 00 00 02"+rest, unknown.data)
}

func TestInquiryFields(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		name, cdb, want string
		length          int
	}{
		{"allocation length", "12 00 00 00 05 00", "GOOD", 5},
		{"allocation length of two bytes", "12 00 00 01 05 00", "GOOD", 96},
		{"no allocation", "12 00 00 00 00 00", "GOOD", 0},
		{"page code without EVPD", "12 00 80 00 ff 00", "5/24/00", 0},
		{"obsolete CMDDT", "12 02 00 00 ff 00", "5/24/00", 0},
		{"unknown page", "12 01 c7 00 ff 00", "5/24/00", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := b.run(cdb(c.cdb), nil)
			require.Equal(t, c.want, r.outcome())
			require.Len(t, r.data, c.length)
		})
	}
}

func TestVitalProductData(t *testing.T) {
	const zeros28 = "00000000000000000000000000000000000000000000000000000000"
	for _, c := range []struct {
		name, page, want string
		plain            bool
	}{
		{name: "supported pages", page: "00", want: "00 00 0008 00 80 83 86 8f b0 b1 b2"},
		{name: "supported pages of a plain disk", page: "00", plain: true,
			want: "00 00 0007 00 80 83 86 8f b0 b1"},
		{name: "serial number", page: "80", want: "00 80 0010 30313233343536373839616263646566"},
		{name: "identification", page: "83", want: `00 83 00b8
			01 03 00 08 3011223344556677
			02 01 00 28 4b55424556495254 4449534b202020202020202020202020 30313233343536373839616263646566
			03 08 00 18 6e61612e 33303131323233333434353536363737 00000000
			51 94 00 04 00000001
			51 95 00 04 00000001
			53 98 00 2c 69716e2e323031372d30312e696f2e6b756265766972743a77726170706572 2c742c307830303031 00000000
			53 a8 00 20 69716e2e323031372d30312e696f2e6b756265766972743a77726170706572 00`},
		{name: "extended inquiry", page: "86", want: "00 86 003c 00 01 0000" + zeros28 + zeros28},
		{name: "block limits", page: "b0", want: `00 b0 003c 00 80 0008 00020000 00000800 00000000
			00100000 00000100 00000008 80000000 0000000000080000 00000000 00000000 00000000 0000000000000000`},
		{name: "block limits of a plain disk", page: "b0", plain: true,
			want: `00 b0 003c 00 80 0008 00020000 00000800 00000000
			00000000 00000000 00000000 00000000 0000000000080000 00000000 00000000 00000000 0000000000000000`},
		{name: "characteristics", page: "b1", want: "00 b1 003c 0001 0000" + zeros28 + zeros28},
		{name: "provisioning", page: "b2", want: "00 b2 0004 00 e4 02 00"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			if c.plain {
				b = newBench(t, plainDisk)
			}
			requireHex(t, c.want, b.good(cdb("12 01"+c.page+"00 ff 00"), nil))
		})
	}
	requireHex(t, `00 b0 003c 00 80 0008 00020000 00000800 00000000
		00100000 00000100 00000008 80000000 0000000000080000 00000100 00000008 00000008 0000000000000000`, newBench(t, stored).good(cdb("12 01 b0 00 ff 00"), nil))
	require.Equal(t, "5/24/00", newBench(t, plainDisk).run(cdb("12 01 b2 00 ff 00"), nil).outcome())
}

// TestListedPagesAnswer checks that page 00h is sorted and every page in it can be read; QEMU
// refuses a disk where that fails.
func TestListedPagesAnswer(t *testing.T) {
	b := newBench(t)
	for _, lun := range []uint64{lun1, 0, 7 << 48} {
		list := b.runAs(b.nexus, lun, cdb("12 01 00 00 ff 00"), nil)
		require.Equal(t, "GOOD", list.outcome())
		require.IsIncreasing(t, list.data[4:])
		for _, code := range list.data[4:] {
			page := b.runAs(b.nexus, lun, []byte{opInquiry, bitEVPD, code, 0, 0xff, 0}, nil)
			require.Equal(t, "GOOD", page.outcome(), "LUN %x page %02x", lun, code)
			require.Equal(t, list.data[0], page.data[0], "peripheral of page %02x", code)
			require.Equal(t, code, page.data[1])
			require.Len(t, page.data, 4+int(page.data[2])<<8+int(page.data[3]))
		}
	}
}

func TestIdentificationIsUnambiguous(t *testing.T) {
	other := newBench(t, func(l *LUN) {
		l.Identity.Serial = "fedcba9876543210"
		l.Identity.NAA[7]++
	})
	require.NotEqual(t, newBench(t).good(cdb("12 01 83 00 ff 00"), nil),
		other.good(cdb("12 01 83 00 ff 00"), nil))
}

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
