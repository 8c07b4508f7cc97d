package libvirt

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestExportsComeBack: what Disk renders is read back, with the defaults filled in.
func TestExportsComeBack(t *testing.T) {
	for _, c := range []struct {
		e Export
		d Device
	}{
		{Export{Name: "fedora.qcow2", Socket: "/run/disk/nbd.sock", Reconnect: 30 * time.Second,
			Serial: "DATA-1"}, Device{BootOrder: 1}},
		{Export{Portal: Portal{Host: "2001:db8::1"}, TLS: true, ReadOnly: true,
			WWN: "3c0ffee000000001"}, Device{Dev: "sdb", Bus: BusSCSI}},
		{Export{Name: "2", Portal: Portal{Host: "disks.example.com", Port: 1},
			AccessMode: ReadShared}, Device{Cache: CacheWriteback, ErrorPolicy: ErrorStop}},
		{Export{Name: "ä & <b>", Socket: "/a b", AccessMode: WriteShared}, Device{}},
	} {
		text := testtool.Must(c.e.DiskXML(c.d))(t)
		e, d := testtool.Must2(ParseExport(text))(t, text)
		require.Equal(t, c.e.withDefaults(), e)
		require.Equal(t, c.d.withDefaults(), d)
	}
}

// TestExportsOfOthers reads elements as libvirt and people write them.
func TestExportsOfOthers(t *testing.T) {
	e, d := testtool.Must2(ParseExport(`<disk type='network' device='disk' snapshot='external'>
  <driver name='qemu' type='raw'/>
  <source protocol='nbd' name='data' tls='no' index='1'>
    <host name='10.0.0.5'/>
    <reconnect delay='0'/>
  </source>
  <backingStore/>
  <target dev='vdb' bus='virtio'/>
  <alias name='virtio-disk1'/>
</disk>`))(t)
	require.Equal(t, Export{Name: "data", AccessMode: WriteExclusive,
		Portal: Portal{Host: "10.0.0.5", Port: DefaultNBDPort}}, e)
	require.Equal(t, Device{Dev: "vdb", Bus: BusVirtio, Kind: KindDisk, Cache: CacheDefault,
		Discard: DiscardIgnore}, d)
}

func TestParseExportRefuses(t *testing.T) {
	disk := func(source string) string {
		return `<disk type='network'>` + source + `<target dev='vda'/></disk>`
	}
	const unix = `<host transport='unix' socket='/s'/>`
	for text, field := range map[string]string{
		`<disk type='file'/>`: "disk/@type",
		disk(`<source protocol='iscsi' name='iqn.2020-01.a:b/1'/>`): "disk/source/@protocol",
		disk(`<source protocol='nbd'/>`):                            "disk/source/host",
		disk(`<source protocol='nbd'>` + unix + unix + `</source>`): "disk/source/host",
		disk(`<source protocol='nbd'><host transport='unix'/></source>`): "disk/source/host/" +
			"@socket",
		disk(`<source protocol='nbd'><host transport='rdma' name='a'/></source>`): "disk/source/" +
			"host/@transport",
		disk(`<source protocol='nbd'><host name='a' port='x'/></source>`): "disk/source/host/@port",
		disk(`<source protocol='nbd'><host name='0.0.0.0'/></source>`):    "disk/source/host/@name",
		disk(`<source protocol='nbd'><host transport='unix' socket='s'/></source>`): "disk/source/" +
			"host/@socket",
		disk(`<source protocol='nbd' tls='yes'>` + unix + `</source>`): "disk/source/@tls",
		disk(`<source protocol='nbd'>` + unix + `<reconnect delay='x'/></source>`): "disk/source/" +
			"reconnect/@delay",
		disk(`<auth username='u'/><source protocol='nbd'>` + unix + `</source>`): "disk/auth",
		disk(`<transient/><source protocol='nbd'>` + unix + `</source>`):         "disk/transient",
		disk(`<wwn>3c0ffee000000001</wwn><source protocol='nbd'>` + unix + `</source>`): "disk/" +
			"wwn",
		`<disk type='network' device='lun'><source protocol='nbd'>` + unix + `</source>` +
			`<target dev='sda' bus='scsi'/></disk>`: "disk/@device",
	} {
		_, _, err := ParseExport(text)
		var wrong *FieldError
		require.ErrorAs(t, err, &wrong, text)
		require.Equal(t, field, wrong.Field, "%s: %v", text, err)
	}
	_, _, err := ParseExport(`<disk/><disk/>`)
	require.ErrorContains(t, err, "follows the <disk> element")
	_, _, err = ParseDisk(disk(`<source protocol='nbd'>` + unix + `</source>`))
	require.ErrorContains(t, err, "want iscsi")
}

// TestNBDSources: a specification names an export as it names a LUN, and Disk renders it.
func TestNBDSources(t *testing.T) {
	luns := testtool.Must(ParseSources(decode(t, `
disks:
  - source: {nbd: {socket: /run/disk/nbd.sock, export: fedora.qcow2, reconnect: 30}}
    access-mode: read-only
    copy: {mode: clone}
  - source: {nbd: {host: {name: "fd00::5"}, tls: true}}
  - source: {nbd: {host: {name: a, port: "1"}, reconnect: "5"}}
    access-mode: read-shared
  - source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}
`)))(t)
	require.Equal(t, []LUN{
		{AccessMode: WriteExclusive, ReadOnly: true, Copy: Copy{Mode: CopyClone},
			NBD: &Export{Name: "fedora.qcow2", Socket: "/run/disk/nbd.sock",
				Reconnect: 30 * time.Second, AccessMode: WriteExclusive, ReadOnly: true}},
		{AccessMode: WriteExclusive, NBD: &Export{Portal: Portal{"fd00::5", DefaultNBDPort},
			TLS: true, AccessMode: WriteExclusive}},
		{AccessMode: ReadShared, ReadOnly: true, NBD: &Export{Portal: Portal{"a", 1},
			Reconnect: 5 * time.Second, AccessMode: ReadShared, ReadOnly: true}},
		{Portals: []Portal{{"a", DefaultPort}}, TargetName: "iqn.2017-01.io.kubevirt:a", Number: 1,
			AccessMode: WriteExclusive},
	}, luns)
	for i, l := range luns[:3] {
		l.Serial = "OWN" // what the LUN says counts
		e, _ := testtool.Must2(ParseExport(testtool.Must(DiskXML(l, Device{}))(t)))(t)
		want := *luns[i].NBD
		want.Serial = "OWN"
		require.Equal(t, want, e)
	}
	_, err := Disk(LUN{NBD: &Export{Socket: "/s"}, Number: 1}, Device{})
	require.ErrorContains(t, err, "LUN.NBD: the disk is an export")

	for text, field := range map[string]string{
		`nbd: 1`:                                         "nbd",
		`disks: [{source: {nbd: {}}}]`:                   "disks[0].source.nbd",
		`nbd: {socket: s}`:                               "nbd.socket",
		`nbd: {socket: 1, host: a}`:                      "nbd.socket",
		`nbd: {host: a}`:                                 "nbd.host",
		`nbd: {host: {name: 0.0.0.0}}`:                   "nbd.host.name",
		`nbd: {host: {name: a, port: 0}}`:                "nbd.host.port",
		`nbd: {host: {name: a, Port: 1}}`:                "nbd.host.Port",
		`nbd: {socket: /s, name: x}`:                     "nbd.name",
		`nbd: {socket: /s, tls: true}`:                   "nbd.tls",
		`nbd: {socket: /s, tls: "yes"}`:                  "nbd.tls",
		`nbd: {socket: /s, reconnect: -1}`:               "nbd.reconnect",
		`nbd: {socket: /s, reconnect: 1s}`:               "nbd.reconnect",
		`nbd: {socket: /s, export: 1}`:                   "nbd.export",
		`nbd: {socket: /s, export: "a\n"}`:               "nbd.export",
		`nbd: {socket: /s, host: {name: a}}`:             "nbd.host",
		`{nbd: {socket: /s}, lun: 1}`:                    "lun",
		`{nbd: {socket: /s}, iscsi: {}}`:                 "iscsi",
		`{source: {nbd: {socket: /s}}, access-mode: rw}`: "access-mode",
	} {
		_, err := ParseSources(decode(t, text))
		var wrong *FieldError
		require.ErrorAs(t, err, &wrong, text)
		require.Equal(t, field, wrong.Field, "%s: %v", text, err)
	}
}

// TestBlockSize: QEMU shows long blocks only if the element says so.
func TestBlockSize(t *testing.T) {
	l := LUN{Portals: []Portal{{Host: "192.0.2.1"}}, TargetName: "iqn.2017-01.io.kubevirt:wrapper",
		Number: 1}
	const long = `<blockio logical_block_size="4096" physical_block_size="4096"></blockio>`
	for size, want := range map[int]bool{0: false, 512: false, 4096: true} {
		l.BlockSize = size
		text := testtool.Must(DiskXML(l, Device{}))(t)
		require.Equal(t, want, strings.Contains(text, long), text)
		again, _ := testtool.Must2(ParseDisk(text))(t)
		require.Equal(t, max(size, 512), max(again.BlockSize, 512))
		e := Export{Name: "a", Socket: "/s", BlockSize: size}
		text = testtool.Must(e.DiskXML(Device{Bus: BusSCSI}))(t)
		require.Equal(t, want, strings.Contains(text, long), text)
		back, _ := testtool.Must2(ParseExport(text))(t)
		require.Equal(t, max(size, 512), max(back.BlockSize, 512))
	}
	l.BlockSize = 4096
	_, err := DiskXML(l, Device{Bus: BusSATA})
	require.ErrorContains(t, err, "sata disks have logical blocks of 512 bytes")
	text := testtool.Must(DiskXML(l, Device{Bus: BusSCSI, Kind: KindLUN}))(t)
	require.NotContains(t, text, "blockio", "the guest asks the target itself")
	text = strings.ReplaceAll(testtool.Must(DiskXML(l, Device{}))(t), `"4096"`, `"1024"`)
	_, _, err = ParseDisk(text)
	require.ErrorContains(t, err, "disk/blockio/@logical_block_size: 1024 is not the length of a")
	l.BlockSize = 1024
	_, err = DiskXML(l, Device{})
	require.ErrorContains(t, err, "1024 is not the length of a logical block")
}

func TestExportDisk(t *testing.T) {
	text := testtool.Must(Export{Name: "fedora.qcow2", Socket: "/run/disk/nbd.sock",
		Reconnect: 30 * time.Second, Serial: "DATA-1"}.DiskXML(Device{BootOrder: 1}))(t)
	require.Equal(t, `<disk type="network" device="disk">
  <driver name="qemu" type="raw" cache="none" discard="unmap"></driver>
  <source protocol="nbd" name="fedora.qcow2">
    <host transport="unix" socket="/run/disk/nbd.sock"></host>
    <reconnect delay="30"></reconnect>
  </source>
  <target dev="vda" bus="virtio"></target>
  <serial>DATA-1</serial>
  <boot order="1"></boot>
</disk>`, text)

	both := Export{Name: "a", Socket: "/s", Portal: Portal{Host: "127.107.0.1"}}
	text = testtool.Must(both.DiskXML(Device{}))(t)
	require.Contains(t, text,
		`<host transport="unix" name="127.107.0.1" port="10809" socket="/s"></host>`)
	back, _ := testtool.Must2(ParseExport(text))(t)
	require.Equal(t, both.withDefaults(), back)

	text = testtool.Must(Export{Portal: Portal{Host: "2001:db8::1"}, TLS: true, ReadOnly: true,
		WWN: "0x3C0FFEE000000001"}.DiskXML(Device{Dev: "sdb", Bus: BusSCSI}))(t)
	require.Equal(t, `<disk type="network" device="disk">
  <driver name="qemu" type="raw" cache="none" discard="unmap"></driver>
  <source protocol="nbd" tls="yes">
    <host name="2001:db8::1" port="10809"></host>
  </source>
  <target dev="sdb" bus="scsi"></target>
  <readonly></readonly>
  <wwn>3c0ffee000000001</wwn>
</disk>`, text)
}

func TestExportsThatCannotBe(t *testing.T) {
	for want, c := range map[string]struct {
		e Export
		d Device
	}{
		"Export.Portal.Host: the host is empty": {},
		`Export.Portal.Host: "a b"`: {e: Export{Socket: "/s",
			Portal: Portal{Host: "a b"}}},
		`Export.Socket: "s" is relative`: {e: Export{Socket: "s"}},
		"has 108 bytes, and QEMU takes at most 107": {e: Export{
			Socket: "/" + strings.Repeat("x", 107)}},
		"Export.TLS: a socket":          {e: Export{Socket: "/s", TLS: true}},
		"Export.Name":                   {e: Export{Socket: "/s", Name: "a\nb"}},
		"Export.Reconnect: 500ms: want": {e: Export{Socket: "/s", Reconnect: time.Second / 2}},
		"Export.Reconnect: -1s: want":   {e: Export{Socket: "/s", Reconnect: -time.Second}},
		"Export.Serial":                 {e: Export{Socket: "/s", Serial: "a/b"}},
		`Device.Dev: "x" is not`:        {e: Export{Socket: "/s"}, d: Device{Dev: "x"}},
		"Device.Kind: NBD takes no":     {e: Export{Socket: "/s"}, d: Device{Kind: KindLUN}},
		"Device.Initiator: an NBD client": {e: Export{Socket: "/s"},
			d: Device{Initiator: "iqn.2026-01.a:b"}},
		"Device.Bus: sata has no read-only": {e: Export{Socket: "/s", ReadOnly: true},
			d: Device{Bus: BusSATA}},
	} {
		_, err := c.e.DiskXML(c.d)
		require.ErrorAs(t, err, new(*FieldError), want)
		require.ErrorContains(t, err, want)
	}
}
