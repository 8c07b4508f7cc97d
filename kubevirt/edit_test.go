package kubevirt

import (
	"cmp"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

const (
	sidecar0 = "/var/run/kubevirt-hooks/hook-sidecar-0/disk/nbd.sock"
	sidecar1 = "/var/run/kubevirt-hooks/hook-sidecar-1/disk/nbd.sock"
	serial   = "0123456789abcdef0123"
)

// served are disks of a sidecar.
func served(names ...string) (all []Disk) {
	for i, name := range names {
		all = append(all, Disk{Number: uint16(i + 1), Export: libvirt.Export{Name: name,
			Socket: sidecar0, Reconnect: 30 * time.Second, Serial: fmt.Sprintf("%s%d", serial[:19],
				i)}})
	}
	return all
}

// vmi is a VirtualMachineInstance with annotations: key, value, key, value.
func vmi(annotations ...string) []byte {
	all := map[string]string{sidecarsAnnotation: `[{"image": "r.example/vm:1"}]`,
		"kubevirt.io/unrelated": "x", annotationPrefix + "handover": "x"}
	for i := 0; i < len(annotations); i += 2 {
		all[annotationPrefix+annotations[i]] = annotations[i+1]
	}
	text, _ := json.Marshal(map[string]any{
		"metadata": map[string]any{"name": "vm", "annotations": all},
		"spec": map[string]any{"volumes": []any{map[string]any{"name": "root"},
			map[string]any{"name": "config"}}},
	})
	return text
}

// before is a domain as KubeVirt makes it, with what this package does not know.
const before = `<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">` +
	`<name>default_vm</name><!-- kept --><metadata><kubevirt xmlns="http://kubevirt.io"><uid>1</uid>` +
	`</kubevirt></metadata><os><type arch="x86_64" machine="q35">hvm</type></os>` +
	`<devices><unknown a='1'  b="&#34;"/>` + rootDisk + configDisk +
	`<interface type="ethernet"><mac address="52:54:00:12:34:56"></mac></interface></devices>` +
	`<qemu:commandline><qemu:arg value="-x"/></qemu:commandline></domain>` + "\n"

const rootDisk = `<disk device="disk" type="file" model="virtio-non-transitional">` +
	`<source file="/var/run/kubevirt/empty/root.qcow2"></source>` +
	`<target bus="virtio" dev="vda"></target>` +
	`<driver error_policy="stop" name="qemu" type="qcow2" discard="unmap" iothread="1"></driver>` +
	`<backingStore type="file"><format type="raw"/><source file="/x"/></backingStore>` +
	`<alias name="ua-root"></alias><boot order="1"></boot><serial>mine</serial></disk>`

const configDisk = `<disk device="disk" type="file"><source file="/config.iso"/>` +
	`<target bus="virtio" dev="vdb"/><alias name="ua-config"/></disk>`

// without is the domain without parts.
func without(domain string, parts ...string) string {
	for _, p := range parts {
		domain = strings.Replace(domain, p, "", 1)
	}
	return domain
}

// edited is the domain with the disks, and its elements.
func edited(t *testing.T, domain string, m []byte, disks ...Disk) (string, libvirtxml.Domain) {
	t.Helper()
	out := testtool.Must(Edit(Call{Domain: []byte(domain), VMI: m}, disks, "hook-sidecar-0"))(t)
	again := testtool.Must(Edit(Call{Domain: out, VMI: m}, disks, "hook-sidecar-0"))(t)
	require.Equal(t, string(out), string(again), "nothing is left to change")
	var d libvirtxml.Domain
	require.NoError(t, d.Unmarshal(string(out)))
	return string(out), d
}

// squeezed is what the launcher makes of a domain that it reads back: libvirt has given addresses,
// and parts of the source are lost.
func squeezed(t *testing.T, domain string) string {
	t.Helper()
	for _, s := range []string{sidecar0, sidecar1} {
		domain = strings.ReplaceAll(domain, `<host transport="unix" socket="`+s+`"></host>`,
			`<host name=""></host>`)
	}
	domain = strings.ReplaceAll(domain, `<reconnect delay="30"></reconnect>`, "")
	require.NotContains(t, domain, "nbd.sock")
	return strings.ReplaceAll(domain, `</target>`, `</target>`+
		`<address type="pci" domain="0x0000" bus="0x07" slot="0x00" function="0x0"></address>`)
}

// TestAdd is the first call, and the second one, with the disk as the launcher hands it back.
func TestAdd(t *testing.T) {
	domain := without(before, `<boot order="1"></boot>`)
	out, d := edited(t, domain, vmi(), served("fedora.qcow2")...)
	const disk = `<disk type="network" device="disk" model="virtio-non-transitional"><driver name="qemu" type="raw" cache="none" ` +
		`error_policy="stop" discard="unmap"></driver><source protocol="nbd" name="fedora.qcow2">` +
		`<host transport="unix" socket="` + sidecar0 + `"></host>` +
		`<reconnect delay="30"></reconnect></source><target dev="vdz" bus="virtio"></target>` +
		`<serial>0123456789abcdef0120</serial><boot order="1"></boot>` +
		`<alias name="ua-hook_vdz"></alias></disk>`
	require.Equal(t, strings.Replace(domain, configDisk, configDisk+disk, 1), out)
	require.Len(t, d.Devices.Disks, 3)

	back := squeezed(t, out)
	again, d := edited(t, back, vmi(), served("fedora.qcow2")...)
	require.Len(t, d.Devices.Disks, 3)
	got := d.Devices.Disks[2]
	require.Equal(t, sidecar0, got.Source.Network.Hosts[0].Socket)
	require.Equal(t, "30", got.Source.Network.Reconnect.Delay)
	require.EqualValues(t, 7, *got.Address.PCI.Bus, "the address stays")
	require.Equal(t, "vdz", got.Target.Dev)
	// What is restored is the source, and nothing else.
	require.Equal(t, back, strings.Replace(again, `<host transport="unix" socket="`+sidecar0+
		`"></host><reconnect delay="30"></reconnect>`, `<host name=""></host>`, 1))
}

func TestAddToFewDevices(t *testing.T) {
	for _, domain := range []string{`<domain/>`, `<domain></domain>`,
		`<domain><devices/></domain>`, `<domain><devices> </devices></domain>`,
		"<?xml version='1.0'?>\n<domain type='kvm'><devices><emulator/></devices>\n</domain>"} {
		_, d := edited(t, domain, vmi(), served("a", "b")...)
		require.Len(t, d.Devices.Disks, 2, domain)
		require.Equal(t, "vdy", d.Devices.Disks[0].Target.Dev)
		require.Equal(t, "vdz", d.Devices.Disks[1].Target.Dev)
		require.EqualValues(t, 1, d.Devices.Disks[0].Boot.Order)
		require.Nil(t, d.Devices.Disks[1].Boot)
	}
}

// TestAnnotations has what they choose, for all disks and for one.
func TestAnnotations(t *testing.T) {
	domain := without(before, rootDisk)
	_, d := edited(t, domain, vmi("bus", "scsi", "bus.2", "sata", "bus.c.qcow2", "usb",
		"cache", "writeback", "cache.hook-sidecar-0", "unsafe", "read-only.a.raw", "true",
		"serial.1", "one", "boot-order.b", "7"), served("a.raw", "b", "c.qcow2")...)
	disks := d.Devices.Disks[1:]
	require.Equal(t, "scsi sata usb", disks[0].Target.Bus+" "+disks[1].Target.Bus+" "+
		disks[2].Target.Bus)
	require.Equal(t, "sdx sdy sdz", disks[0].Target.Dev+" "+disks[1].Target.Dev+" "+
		disks[2].Target.Dev)
	require.EqualValues(t, 1, *disks[0].Address.Drive.Target)
	require.EqualValues(t, 0, *disks[1].Address.Drive.Unit)
	require.Nil(t, disks[2].Address)
	require.NotNil(t, disks[0].ReadOnly)
	require.Nil(t, disks[1].ReadOnly)
	require.Equal(t, "one", disks[0].Serial)
	require.Nil(t, disks[0].Boot)
	require.EqualValues(t, 7, disks[1].Boot.Order)
	for _, disk := range disks {
		require.Equal(t, "unsafe", disk.Driver.Cache)
	}
	require.Len(t, d.Devices.Controllers, 1)
	require.Equal(t, "virtio-scsi", d.Devices.Controllers[0].Model)
}

// TestPlaces are those that are taken already.
func TestPlaces(t *testing.T) {
	const domain = `<domain><devices><controller type="scsi" model="virtio-non-transitional"/>` +
		`<disk><target dev="vdz" bus="virtio"/></disk>` +
		`<disk><target dev="sda" bus="sata"/></disk>` +
		`<disk><target dev="sdz" bus="sata"/><address type="drive" unit="1"/></disk>` +
		`<disk><target dev="sdc" bus="scsi"/><address type="drive" target="1" unit="2"/></disk>` +
		`</devices></domain>`
	_, d := edited(t, domain, vmi("bus.a", "virtio", "bus.b", "sata", "bus.c", "scsi"),
		served("a", "b", "c")...)
	disks := d.Devices.Disks[4:]
	require.Equal(t, "vdy sdx sdy", disks[0].Target.Dev+" "+disks[1].Target.Dev+" "+
		disks[2].Target.Dev)
	require.EqualValues(t, 2, *disks[1].Address.Drive.Unit)
	require.EqualValues(t, 2, *disks[2].Address.Drive.Target)
	require.Len(t, d.Devices.Controllers, 1)
}

// TestBootOrder is about the machine's own word.
func TestBootOrder(t *testing.T) {
	last := func(domain string, m []byte) libvirtxml.DomainDisk {
		_, d := edited(t, domain, m, served("a")...)
		return d.Devices.Disks[len(d.Devices.Disks)-1]
	}
	require.Nil(t, last(before, vmi()).Boot, "the machine boots from its own disk")
	require.EqualValues(t, 2, last(before, vmi("boot-order", "2")).Boot.Order)
	byKind := strings.Replace(without(before, `<boot order="1"></boot>`), "</os>",
		`<boot dev="hd"/></os>`, 1)
	require.Nil(t, last(byKind, vmi()).Boot)
	require.Nil(t, last(without(before, `<boot order="1"></boot>`), vmi("boot-order", "0")).Boot)
	net := without(before, rootDisk)
	net = strings.Replace(net, "</interface>", `<boot order="1"/></interface>`, 1)
	require.Nil(t, last(net, vmi()).Boot, "the machine boots from the network")
}

// TestReplace exchanges the source of KubeVirt's own disk.
func TestReplace(t *testing.T) {
	m := vmi("replace", "root")
	out, d := edited(t, before, m, served("fedora.qcow2")...)
	require.Len(t, d.Devices.Disks, 2)
	const want = `<disk device="disk" type="network" model="virtio-non-transitional">` +
		`<source protocol="nbd" name="fedora.qcow2"><host transport="unix" socket="` + sidecar0 +
		`"></host><reconnect delay="30"></reconnect></source>` +
		`<target bus="virtio" dev="vda"></target><driver error_policy="stop" name="qemu" ` +
		`type="raw" discard="unmap" iothread="1" cache="none"></driver>` +
		`<alias name="ua-root"></alias><boot order="1"></boot><serial>mine</serial></disk>`
	require.Equal(t, strings.Replace(before, rootDisk, want, 1), out)

	again, d := edited(t, squeezed(t, out), m, served("fedora.qcow2")...)
	require.Len(t, d.Devices.Disks, 2)
	require.Contains(t, again, sidecar0)
	require.EqualValues(t, 7, *d.Devices.Disks[0].Address.PCI.Bus)

	_, d = edited(t, before, vmi("replace.b", "config", "read-only.b", "true"), served("a", "b")...)
	require.Len(t, d.Devices.Disks, 3)
	require.Equal(t, "b", d.Devices.Disks[1].Source.Network.Name)
	require.NotNil(t, d.Devices.Disks[1].ReadOnly)
	require.Empty(t, d.Devices.Disks[1].Serial, "the machine has given it none")
	require.Equal(t, "a", d.Devices.Disks[2].Source.Network.Name)
}

// TestTwoSidecars: each adds its own disk of the same name, and leaves the other's alone, in every
// call.
func TestTwoSidecars(t *testing.T) {
	first, second := served("disk.img"), served("disk.img")
	second[0].Export.Socket, second[0].Export.Serial = sidecar1, "other"
	m := vmi("bus.hook-sidecar-1", "scsi")
	m = []byte(strings.Replace(string(m), `r.example/vm:1\"}`, `a\"}, {\"image\": \"b\"}`, 1))
	domain := []byte(without(before, rootDisk))
	for range 2 {
		domain = testtool.Must(Edit(Call{Domain: domain, VMI: m}, first, "hook-sidecar-0"))(t)
		domain = testtool.Must(Edit(Call{Domain: domain, VMI: m}, second, "hook-sidecar-1"))(t)
		var d libvirtxml.Domain
		require.NoError(t, xml.Unmarshal(domain, &d))
		require.Len(t, d.Devices.Disks, 3)
		require.Equal(t, sidecar0, d.Devices.Disks[1].Source.Network.Hosts[0].Socket)
		require.Equal(t, "virtio", d.Devices.Disks[1].Target.Bus)
		require.EqualValues(t, 1, d.Devices.Disks[1].Boot.Order)
		require.Equal(t, sidecar1, d.Devices.Disks[2].Source.Network.Hosts[0].Socket)
		require.Equal(t, "scsi", d.Devices.Disks[2].Target.Bus)
		require.Nil(t, d.Devices.Disks[2].Boot)
		domain = []byte(squeezed(t, string(domain)))
	}
}

// TestAnyOrder: the launcher asks hook sidecars in the order in which it finds their sockets. The
// machine is the same: it boots from the same disk, and the guest meets the disks in the same
// order.
func TestAnyOrder(t *testing.T) {
	for name, one := range map[string]struct {
		said []string
		want string // the names of targets, with the boot order
	}{
		"nothing is said": {nil, "vdy 1 vdz  vdaz "},
		"the first does not boot": {[]string{"boot-order.hook-sidecar-0", "0"},
			"vdy  vdz  vdaz 1"},
		"the second is the first": {[]string{"boot-order.hook-sidecar-1", "1"},
			"vdy  vdz  vdaz 1"},
		"the second is another": {[]string{"boot-order.hook-sidecar-1", "2"},
			"vdy 1 vdz  vdaz 2"},
		"one is the second": {[]string{"boot-order.b", "2"}, "vdy  vdz 2 vdaz "},
		"on another bus":    {[]string{"bus", "scsi", "boot-order.a", "0"}, "sdy  sdz 1 sdaz "},
		"by vhost-user":     {[]string{"transport", "vhost-user"}, "vdy 1 vdz  vdaz "},
	} {
		t.Run(name, func(t *testing.T) {
			m := []byte(strings.Replace(string(vmi(one.said...)), `r.example/vm:1\"}`,
				`a\"}, {\"image\": \"b\"}`, 1))
			hooks := [][]Disk{served("a", "b"), served("c")}
			hooks[1][0].Export.Socket, hooks[1][0].Export.Serial = sidecar1, "other"
			for i := range hooks {
				for j := range hooks[i] {
					hooks[i][j].VhostUser.Socket = fmt.Sprintf("/hooks/%d/%d", i, j)
				}
			}
			var targets []string
			for _, order := range [][]int{{0, 1}, {1, 0}} {
				domain := []byte(without(before, rootDisk))
				for _, i := range order {
					domain = testtool.Must(Edit(Call{Domain: domain, VMI: m}, hooks[i],
						fmt.Sprint(sidecarPrefix, i)))(t)
				}
				var d libvirtxml.Domain
				require.NoError(t, xml.Unmarshal(domain, &d))
				disks := d.Devices.Disks[1:]
				slices.SortFunc(disks, func(a, b libvirtxml.DomainDisk) int { // as libvirt does
					return cmp.Or(len(a.Target.Dev)-len(b.Target.Dev),
						strings.Compare(a.Target.Dev, b.Target.Dev))
				})
				is, scsi := "", -1
				for _, disk := range disks {
					boot := ""
					if disk.Boot != nil {
						boot = fmt.Sprint(disk.Boot.Order)
					}
					is += disk.Target.Dev + " " + boot + " "
					if a := disk.Address; a != nil {
						require.Greater(t, int(*a.Drive.Target), scsi)
						scsi = int(*a.Drive.Target)
					}
				}
				targets = append(targets, strings.TrimSuffix(is, " "))
			}
			require.Equal(t, []string{one.want, one.want}, targets)
		})
	}
}

// TestReadShared: a disk that others read, too, is read-only and shareable.
func TestReadShared(t *testing.T) {
	disks := served("a")
	disks[0].Export.AccessMode = libvirt.ReadShared
	_, d := edited(t, without(before, rootDisk), vmi(), disks...)
	require.NotNil(t, d.Devices.Disks[1].ReadOnly)
	require.NotNil(t, d.Devices.Disks[1].Shareable)
	_, d = edited(t, before, vmi("replace", "root"), disks...)
	require.NotNil(t, d.Devices.Disks[0].ReadOnly)
	require.NotNil(t, d.Devices.Disks[0].Shareable)
}

// TestSocketDropped: KubeVirt 1.9 may drop the socket behind the answer. What it leaves is the
// address, and the next answer has both again.
func TestSocketDropped(t *testing.T) {
	disks := served("fedora.qcow2")
	disks[0].Export.Portal = libvirt.Portal{Host: "127.107.0.1", Port: 10809}
	const left = `<host name="127.107.0.1" port="10809"></host>`
	for what, m := range map[string][]byte{"added": vmi(), "replaced": vmi("replace", "root")} {
		require.True(t, Fresh(Call{Domain: []byte(before), VMI: m}, disks, "hook-sidecar-0"), what)
		out, _ := edited(t, before, m, disks...)
		require.Contains(t, out, `<host transport="unix" name="127.107.0.1" port="10809" socket="`+
			sidecar0+`"></host>`, what)
		back := strings.Replace(out, ` transport="unix" name="127.107.0.1" port="10809" socket="`+
			sidecar0+`"`, ` name="127.107.0.1" port="10809"`, 1)
		require.Contains(t, back, left)
		require.False(t, Fresh(Call{Domain: []byte(back), VMI: m}, disks, "hook-sidecar-0"), what)
		again, _ := edited(t, back, m, disks...)
		require.Equal(t, out, again, what)

		other := Call{Domain: []byte(strings.Replace(back, left,
			`<host name="192.0.2.1" port="10809"></host>`, 1)), VMI: m}
		_, err := Edit(other, disks, "hook-sidecar-0")
		require.Error(t, err, "%s: the disk is another's", what)
	}
	require.False(t, Fresh(Call{Domain: []byte("<"), VMI: vmi()}, disks, ""))
	require.False(t, Fresh(Call{VMI: []byte("{")}, disks, ""))
}
