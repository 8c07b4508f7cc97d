package libvirt

import (
	"encoding/xml"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/testtool"
)

const vhostUserDisk = `<disk type="vhostuser" device="disk">
  <driver name="qemu" type="raw" queues="4"></driver>
  <source type="unix" path="/run/disks/a.sock">
    <reconnect enabled="yes" timeout="1"></reconnect>
  </source>
  <target dev="vdb" bus="virtio"></target>
  <boot order="2"></boot>
</disk>`

// TestVhostUser renders a disk and reads it back.
func TestVhostUser(t *testing.T) {
	v := VhostUser{Socket: "/run/disks/a.sock", Queues: 4, Reconnect: time.Second}
	text := testtool.Must(v.DiskXML(Device{Dev: "vdb", BootOrder: 2}))(t)
	require.Equal(t, vhostUserDisk, text)
	back, d := testtool.Must2(ParseVhostUser(text))(t)
	require.Equal(t, v, back)
	require.Equal(t, Device{Dev: "vdb", Bus: BusVirtio, Kind: KindDisk, BootOrder: 2}, d)
	require.Equal(t, text, testtool.Must(back.DiskXML(d))(t))

	text = testtool.Must(VhostUser{Socket: "/s"}.DiskXML(Device{}))(t)
	require.NotContains(t, text, "reconnect")
	require.NotContains(t, text, "queues")
	require.Contains(t, text, `dev="vda"`)
}

// TestVhostUserRefuses what libvirt has not for such a disk, before libvirt does.
func TestVhostUserRefuses(t *testing.T) {
	at := VhostUser{Socket: "/s"}
	for want, c := range map[string]struct {
		v VhostUser
		d Device
	}{
		"VhostUser.Socket: it is empty":     {},
		`VhostUser.Socket: "s" is relative`: {v: VhostUser{Socket: "s"}},
		"has 108 bytes, and QEMU takes at most 107": {v: VhostUser{
			Socket: "/" + strings.Repeat("x", 107)}},
		"VhostUser.Queues: 17: want at most 16": {v: VhostUser{Socket: "/s", Queues: 17}},
		"VhostUser.Reconnect: 1.5s: want whole": {v: VhostUser{Socket: "/s", Reconnect: 1500e6}},
		"VhostUser.Reconnect: -1s: want whole":  {v: VhostUser{Socket: "/s", Reconnect: -1e9}},
		`Device.Dev: "x" is not`:                {at, Device{Dev: "x"}},
		"Device.Bus: scsi":                      {at, Device{Bus: BusSCSI}},
		"Device.Cache: libvirt has none":        {at, Device{Cache: CacheNone}},
		"Device.ErrorPolicy: libvirt has none":  {at, Device{ErrorPolicy: ErrorStop}},
	} {
		require.ErrorContains(t, testtool.Err(c.v.Disk(c.d)), want)
	}
	for from, to := range map[string]string{
		`<boot order="2"></boot>`:  "<serial>X</serial>",
		`queues="4"`:               `cache="none"`,
		`type="unix"`:              `type="tcp"`,
		`type="vhostuser"`:         `type="file"`,
		`path="/run/disks/a.sock"`: "",
	} {
		_, _, err := ParseVhostUser(strings.Replace(vhostUserDisk, from, to, 1))
		require.Error(t, err, to)
		require.Contains(t, err.Error(), "disk/", to)
	}
}

func TestSharedMemory(t *testing.T) {
	var domain libvirtxml.Domain
	require.NoError(t, xml.Unmarshal([]byte("<domain>"+SharedMemoryXML+"</domain>"), &domain))
	require.Equal(t, SharedMemory(), domain.MemoryBacking)
}
