package libvirt

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
		text, err := c.e.DiskXML(c.d)
		require.NoError(t, err)
		e, d, err := ParseExport(text)
		require.NoError(t, err, text)
		require.Equal(t, c.e.withDefaults(), e)
		require.Equal(t, c.d.withDefaults(), d)
	}
}

// TestExportsOfOthers reads elements as libvirt and people write them.
func TestExportsOfOthers(t *testing.T) {
	e, d, err := ParseExport(`<disk type='network' device='disk' snapshot='external'>
  <driver name='qemu' type='raw'/>
  <source protocol='nbd' name='data' tls='no' index='1'>
    <host name='10.0.0.5'/>
    <reconnect delay='0'/>
  </source>
  <backingStore/>
  <target dev='vdb' bus='virtio'/>
  <alias name='virtio-disk1'/>
</disk>`)
	require.NoError(t, err)
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
	luns, err := ParseSources(decode(t, `
disks:
  - source: {nbd: {socket: /run/disk/nbd.sock, export: fedora.qcow2, reconnect: 30}}
    access-mode: read-only
    copy: {mode: clone}
  - source: {nbd: {host: {name: "fd00::5"}, tls: true}}
  - source: {nbd: {host: {name: a, port: "1"}, reconnect: "5"}}
    access-mode: read-shared
  - source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}
`))
	require.NoError(t, err)
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
		text, err := DiskXML(l, Device{})
		require.NoError(t, err)
		e, _, err := ParseExport(text)
		require.NoError(t, err)
		want := *luns[i].NBD
		want.Serial = "OWN"
		require.Equal(t, want, e)
	}
	_, err = Disk(LUN{NBD: &Export{Socket: "/s"}, Number: 1}, Device{})
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
