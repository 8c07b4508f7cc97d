package libvirt

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestBlockSize: QEMU shows long blocks only if the element says so.
func TestBlockSize(t *testing.T) {
	l := LUN{Portals: []Portal{{Host: "192.0.2.1"}}, TargetName: "iqn.2017-01.io.kubevirt:wrapper",
		Number: 1}
	const long = `<blockio logical_block_size="4096" physical_block_size="4096"></blockio>`
	for size, want := range map[int]bool{0: false, 512: false, 4096: true} {
		l.BlockSize = size
		text, err := DiskXML(l, Device{})
		require.NoError(t, err)
		require.Equal(t, want, strings.Contains(text, long), text)
		again, _, err := ParseDisk(text)
		require.NoError(t, err)
		require.Equal(t, max(size, 512), max(again.BlockSize, 512))
		e := Export{Name: "a", Socket: "/s", BlockSize: size}
		text, err = e.DiskXML(Device{Bus: BusSCSI})
		require.NoError(t, err)
		require.Equal(t, want, strings.Contains(text, long), text)
		back, _, err := ParseExport(text)
		require.NoError(t, err)
		require.Equal(t, max(size, 512), max(back.BlockSize, 512))
	}
	l.BlockSize = 4096
	_, err := DiskXML(l, Device{Bus: BusSATA})
	require.ErrorContains(t, err, "sata disks have logical blocks of 512 bytes")
	text, err := DiskXML(l, Device{Bus: BusSCSI, Kind: KindLUN})
	require.NoError(t, err)
	require.NotContains(t, text, "blockio", "the guest asks the target itself")
	l.BlockSize = 1024
	_, err = DiskXML(l, Device{})
	require.ErrorContains(t, err, "1024 is not the length of a logical block")
}

func TestExportDisk(t *testing.T) {
	text, err := Export{Name: "fedora.qcow2", Socket: "/run/disk/nbd.sock",
		Reconnect: 30 * time.Second, Serial: "DATA-1"}.DiskXML(Device{BootOrder: 1})
	require.NoError(t, err)
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
	text, err = both.DiskXML(Device{})
	require.NoError(t, err)
	require.Contains(t, text,
		`<host transport="unix" name="127.107.0.1" port="10809" socket="/s"></host>`)
	back, _, err := ParseExport(text)
	require.NoError(t, err)
	require.Equal(t, both.withDefaults(), back)

	text, err = Export{Portal: Portal{Host: "2001:db8::1"}, TLS: true, ReadOnly: true,
		WWN: "0x3C0FFEE000000001"}.DiskXML(Device{Dev: "sdb", Bus: BusSCSI})
	require.NoError(t, err)
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
		"Export.TLS: a socket":           {e: Export{Socket: "/s", TLS: true}},
		"Export.Name":                    {e: Export{Socket: "/s", Name: "a\nb"}},
		"Export.Reconnect: 500ms: want":  {e: Export{Socket: "/s", Reconnect: time.Second / 2}},
		"Export.Reconnect: -1s: want":    {e: Export{Socket: "/s", Reconnect: -time.Second}},
		"Export.Serial":                  {e: Export{Socket: "/s", Serial: "a/b"}},
		`Device.Dev: "x" is not`:         {e: Export{Socket: "/s"}, d: Device{Dev: "x"}},
		"Device.Kind: NBD takes no":      {e: Export{Socket: "/s"}, d: Device{Kind: KindLUN}},
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
