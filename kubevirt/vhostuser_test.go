package kubevirt

import (
	"cmp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/libvirt"
)

const vhostSocket = "/var/run/kubevirt-hooks/hook-sidecar-0/disk/vhost-user/a.sock"

// shared are disks of a sidecar that can be had by vhost-user.
func shared(names ...string) []Disk {
	disks := served(names...)
	for i := range disks {
		disks[i].VhostUser = libvirt.VhostUser{Reconnect: time.Second,
			Socket: strings.Replace(vhostSocket, "/a.sock", "/"+names[i]+".sock", 1)}
	}
	return disks
}

// reread is what the launcher makes of a domain with such a disk when it reads it back.
func reread(domain string) string {
	for _, part := range []string{`<memoryBacking><source type="memfd"></source>` +
		`<access mode="shared"></access></memoryBacking>`} {
		domain = strings.Replace(domain, part, "", 1)
	}
	from := strings.Index(domain, `<source type="unix"`)
	to := from + strings.Index(domain[from:], "</source>")
	return domain[:from] + "<source>" + domain[to:]
}

// TestVhostUser: the disk is added with the memory that it needs, and restored in its place when
// the launcher has lost what it does not know.
func TestVhostUser(t *testing.T) {
	domain := without(before, `<boot order="1"></boot>`)
	m := vmi("transport", "vhost-user")
	const memory = `<memoryBacking><source type="memfd"></source><access mode="shared"></access>` +
		`</memoryBacking>`
	const disk = `<disk type="vhostuser" device="disk" model="virtio-non-transitional">` +
		`<driver name="qemu" type="raw"></driver><source type="unix" path="` + vhostSocket + `">` +
		`<reconnect enabled="yes" timeout="1"></reconnect></source>` +
		`<target dev="vdz" bus="virtio"></target><boot order="1"></boot>` +
		`<alias name="ua-hook_hook-sidecar-0_1"></alias></disk>`
	want := strings.Replace(domain, configDisk, configDisk+disk, 1)
	want = strings.Replace(want, "<devices>", memory+"<devices>", 1)
	out, _ := edited(t, domain, m, shared("a")...)
	require.Equal(t, want, out)
	again, _ := edited(t, reread(out), m, shared("a")...)
	require.Equal(t, want, again)

	// One of two disks, and none.
	_, d := edited(t, domain, vmi("transport.a", "vhost-user"), shared("a", "b")...)
	require.NotNil(t, d.Devices.Disks[2].Source.VHostUser)
	require.Equal(t, "nbd", d.Devices.Disks[3].Source.Network.Protocol)
	for _, none := range [][]byte{vmi(), vmi("transport", "nbd")} {
		_, d = edited(t, domain, none, shared("a")...)
		require.Nil(t, d.MemoryBacking)
		require.Equal(t, "nbd", d.Devices.Disks[2].Source.Network.Protocol)
	}
	_, d = edited(t, "<domain/>", m, shared("a", "b")...)
	require.Len(t, d.Devices.Disks, 2)
	require.Equal(t, "shared", d.MemoryBacking.MemoryAccess.Mode)
}

// TestVhostUserReplaces: of KubeVirt's disk stays where the guest sees it, and its queues.
func TestVhostUserReplaces(t *testing.T) {
	root := strings.Replace(without(rootDisk, "<serial>mine</serial>"), `iothread="1"`,
		`iothread="1" queues="4"`, 1)
	domain := strings.Replace(before, rootDisk, root, 1)
	m := vmi("transport", "vhost-user", "replace", "root")
	const disk = `<disk device="disk" type="vhostuser" model="virtio-non-transitional">` +
		`<source type="unix" path="` + vhostSocket + `"><reconnect enabled="yes" timeout="1">` +
		`</reconnect></source><target bus="virtio" dev="vda"></target>` +
		`<driver name="qemu" type="raw" queues="4"></driver><alias name="ua-root"></alias>` +
		`<boot order="1"></boot></disk>`
	out, d := edited(t, domain, m, shared("a")...)
	require.Contains(t, out, disk)
	require.Len(t, d.Devices.Disks, 2)
	again, _ := edited(t, reread(out), m, shared("a")...)
	require.Equal(t, out, again)
}

// TestVhostUserQueues: there are no more than the server has, whatever the machine says.
func TestVhostUserQueues(t *testing.T) {
	for domain, want := range map[string]string{
		"<domain><vcpu>16</vcpu></domain>": "",
		"<domain><vcpu>17</vcpu></domain>": `queues="16"`,
		`<domain><devices><disk type="file"><driver queues="32"/><target dev="vda" bus="virtio"/>` +
			`</disk></devices></domain>`: `type="raw" queues="16"`,
	} {
		out, _ := edited(t, domain, vmi("transport", "vhost-user"), shared("a")...)
		require.Contains(t, out, want)
		require.Equal(t, want != "", strings.Contains(out, "queues="), out)
	}
}

// TestSharedMemory: what is missing is added, and what says the contrary is not changed.
func TestSharedMemory(t *testing.T) {
	const source, access = `<source type="memfd"></source>`, `<access mode="shared"></access>`
	for has, want := range map[string]string{
		"<memoryBacking/>": source + access,
		"<memoryBacking><hugepages/></memoryBacking>":   "<hugepages/>" + access,
		"<memoryBacking>" + access + "</memoryBacking>": access + source,
		"<memoryBacking><nosharepages/><source type='memfd'/></memoryBacking>": "<nosharepages/>" +
			"<source type='memfd'/>" + access,
	} {
		out, _ := edited(t, "<domain>"+has+"<devices/></domain>", vmi("transport", "vhost-user"),
			shared("a")...)
		require.Contains(t, out, "<memoryBacking>"+want+"</memoryBacking>")
	}
}

// TestVhostUserCannotBe: an annotation that asks for what cannot be had is refused, with what can
// be done.
func TestVhostUserCannotBe(t *testing.T) {
	small := shared("a")
	small[0].MemoryLimit = 64 << 20
	none := shared("a")
	none[0].VhostUser.Socket = ""
	domain := func(parts string) string { return "<domain>" + parts + "<devices/></domain>" }
	const memory = `<memory unit="b">134217728</memory>`
	for want, c := range map[string]struct {
		domain      string // "": one that can
		disks       []Disk // nil: one that can
		annotations []string
	}{
		"has no socket for vhost-user":                 {disks: none},
		"leave out annotation disk.kubevirt.io/bus":    {annotations: []string{"bus", "scsi"}},
		"leave out annotation disk.kubevirt.io/cache":  {annotations: []string{"cache", "none"}},
		"leave out annotation disk.kubevirt.io/serial": {annotations: []string{"serial", "x"}},
		"cannot make a vhost-user disk read-only": {annotations: []string{"read-only",
			"true"}},
		"memory is encrypted": {domain: domain(`<launchSecurity type="tdx"/>`)},
		"says that its memory is private": {domain: domain(
			`<memoryBacking><access mode="private"/></memoryBacking>`)},
		"its memory is private": {domain: domain(
			`<cpu><numa><cell memAccess="private"/></numa></cpu>`)},
		"of the kind anonymous": {domain: domain(
			`<memoryBacking><source type="anonymous"/></memoryBacking>`)},
		"may use 64 MiB of memory, and the guest has 128 MiB": {domain: domain(memory),
			disks: small},
		"gives the disk of volume \"root\" a serial": {annotations: []string{"replace", "root"}},
	} {
		c.domain = cmp.Or(c.domain, before)
		if c.disks == nil {
			c.disks = shared("a")
		}
		_, err := Edit(Call{Domain: []byte(c.domain), VMI: vmi(append(c.annotations, "transport",
			"vhost-user")...)}, c.disks, "hook-sidecar-0")
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "annotation disk.kubevirt.io/transport")
	}
	// Huge pages belong to QEMU, whoever fills them.
	_, d := edited(t, domain(memory+"<memoryBacking><hugepages/></memoryBacking>"),
		vmi("transport", "vhost-user"), small...)
	require.Len(t, d.Devices.Disks, 1)
	_, err := Edit(Call{Domain: []byte(before), VMI: vmi("transport", "iscsi")}, shared("a"), "")
	require.ErrorContains(t, err, `"iscsi" is unknown: want nbd or vhost-user`)
	long := shared("a")
	long[0].VhostUser.Socket = "/" + strings.Repeat("x", 107)
	_, err = Edit(Call{Domain: []byte(before), VMI: vmi("transport", "vhost-user")}, long, "")
	require.ErrorContains(t, err, "has 108 bytes, and QEMU takes at most 107")
}
