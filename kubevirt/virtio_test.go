package kubevirt

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/testtool"
)

// machineOf is a VirtualMachineInstance with a specification.
func machineOf(spec string, annotations ...string) []byte {
	text := string(vmi(annotations...))
	if spec == "" {
		return []byte(text)
	}
	return []byte(strings.Replace(text, `"spec":{`, `"spec":{`+spec+`,`, 1))
}

// TestVirtio: a disk that is added has what KubeVirt gives every virtio device of the machine. The
// devices are as KubeVirt 1.7 makes them; where there are none, the machine says what it is.
func TestVirtio(t *testing.T) {
	root := func(model, driver string) string {
		return `<disk device="disk" type="file" model="` + model + `"><source file="/root.img">` +
			`</source><target bus="virtio" dev="vda"></target><driver name="qemu" type="raw" ` +
			`error_policy="stop" discard="unmap"` + driver + `></driver>` +
			`<alias name="ua-root"></alias></disk>`
	}
	balloon := func(model, driver string) string {
		return `<memballoon model="` + model + `"><stats period="10"></stats>` + driver +
			`</memballoon>`
	}
	const modern, old = "virtio-non-transitional", "virtio-transitional"
	const iommu, driver = ` iommu="on"`, `<driver iommu="on"></driver>`
	const amd64 = `"architecture": "amd64", "domain": `
	for name, c := range map[string]struct {
		spec, root, devices, head string
		model, iommu              string
		queues                    uint
		controller                string
	}{
		"usual": {root: root(modern, ""), devices: balloon(modern, ""), model: modern,
			controller: modern},
		"SEV": {spec: amd64 + `{"launchSecurity": {"sev": {}}}`, root: root(modern, iommu),
			head:    `<launchSecurity type="sev"><policy>0x3</policy></launchSecurity>`,
			devices: balloon(modern, driver), model: modern, iommu: "on", controller: modern},
		"SEV, no other device": {spec: amd64 + `{"launchSecurity": {"sev": {}}}`, iommu: "on",
			devices: balloon("none", ""), controller: "virtio-scsi"},
		"SEV, the domain says so": {iommu: "on", controller: "virtio-scsi",
			head: `<launchSecurity type="sev"><policy>0x3</policy></launchSecurity>`},
		"SNP": {spec: amd64 + `{"launchSecurity": {"snp": {}}}`, model: modern, iommu: "on",
			head:    `<launchSecurity type="sev-snp"></launchSecurity>`,
			devices: balloon(modern, driver), controller: modern},
		"TDX": {spec: amd64 + `{"launchSecurity": {"tdx": {}}}`, root: root(modern, ""),
			head:    `<launchSecurity type="tdx"></launchSecurity>`,
			devices: balloon(modern, ""), model: modern, controller: modern},
		"SE": {spec: `"architecture": "s390x", "domain": {"launchSecurity": {}}`,
			root: root("virtio", iommu), devices: balloon("virtio", driver), model: "virtio",
			iommu: "on", controller: "virtio-scsi"},
		"SE, no other device": {spec: `"architecture": "s390x", "domain": {"launchSecurity": {}}`,
			iommu: "on", controller: "virtio-scsi"},
		"s390x": {spec: `"architecture": "s390x", "domain": {}`, root: root("virtio", ""),
			model: "virtio", controller: "virtio-scsi"},
		"transitional": {root: root(old, ""), devices: balloon(old, ""), model: old,
			controller: old},
		"transitional, only a network": {model: old, controller: old,
			devices: `<interface type="ethernet"><model type="virtio-transitional"></model>` +
				`</interface>`},
		"transitional, no other device": {model: old, controller: old,
			spec: amd64 + `{"devices": {"useVirtioTransitional": true}}`},
		"a random source": {model: modern, iommu: "on", controller: modern,
			devices: `<rng model="` + modern + `"><driver iommu="on"></driver></rng>`},
		"block size": {root: strings.Replace(root(modern, ""), "<alias",
			`<blockio logical_block_size="4096" physical_block_size="4096"></blockio><alias`, 1),
			model: modern, controller: modern},
		"multiqueue": {root: root(modern, ` queues="2"`), model: modern, queues: 2,
			controller: modern},
		"multiqueue, no other device": {spec: amd64 + `{"devices": {"blockMultiQueue": true}}`,
			head: `<vcpu placement="static">3</vcpu>`, queues: 3, controller: "virtio-scsi"},
	} {
		t.Run(name, func(t *testing.T) {
			domain := `<domain type="kvm"><name>vm</name>` + c.head + `<devices>` + c.root +
				c.devices + `</devices></domain>`
			m := machineOf(c.spec, "bus.b", "scsi", "bus.c", "sata")
			_, d := edited(t, domain, m, served("a", "b", "c")...)
			disks := d.Devices.Disks[len(d.Devices.Disks)-3:]
			require.Equal(t, c.model, disks[0].Model)
			require.Equal(t, c.iommu, disks[0].Driver.IOMMU)
			require.Nil(t, disks[0].BlockIO, "that is a matter of each disk")
			queues := uint(0)
			if disks[0].Driver.Queues != nil {
				queues = *disks[0].Driver.Queues
			}
			require.Equal(t, c.queues, queues)
			for _, other := range disks[1:] {
				require.Empty(t, other.Model, "it is no virtio device")
				require.Empty(t, other.Driver.IOMMU)
				require.Nil(t, other.Driver.Queues)
			}
			controller := d.Devices.Controllers[0]
			require.Equal(t, c.controller, controller.Model)
			require.Equal(t, c.iommu == "on", controller.Driver != nil)
			if c.root == "" {
				return
			}
			out, d := edited(t, domain, machineOf(c.spec, "replace", "root"), served("a")...)
			require.Equal(t, c.model, d.Devices.Disks[0].Model, out)
			require.Equal(t, c.iommu, d.Devices.Disks[0].Driver.IOMMU)
			require.Equal(t, "nbd", d.Devices.Disks[0].Source.Network.Protocol)
			require.Nil(t, d.Devices.Disks[0].BlockIO)
		})
	}
}

// TestReplaceBlocks: the blocks of a disk are those of its content, whatever KubeVirt's own disk
// has had. All else about them stays.
func TestReplaceBlocks(t *testing.T) {
	blocks := func(attributes string) string {
		if attributes == "" {
			return before
		}
		return strings.Replace(before, `<alias name="ua-root">`, `<blockio `+attributes+
			`></blockio><alias name="ua-root">`, 1)
	}
	replaced := func(domain string, size int) *libvirtxml.DomainDiskBlockIO {
		disks := served("a")
		disks[0].Export.BlockSize = size
		_, d := edited(t, domain, vmi("replace", "root"), disks...)
		return d.Devices.Disks[0].BlockIO
	}
	const long = `logical_block_size="4096" physical_block_size="4096"`
	for _, domain := range []string{blocks(""), blocks(long),
		blocks(`logical_block_size="512" physical_block_size="4096"`)} {
		got := replaced(domain, 4096)
		require.EqualValues(t, 4096, got.LogicalBlockSize)
		require.EqualValues(t, 4096, got.PhysicalBlockSize)
	}
	require.Nil(t, replaced(blocks(""), 512))
	require.Nil(t, replaced(blocks(long), 512))
	require.Nil(t, replaced(blocks(long), 0))
	got := replaced(blocks(`logical_block_size="512" physical_block_size="4096" `+
		`discard_granularity="65536"`), 512)
	require.EqualValues(t, 4096, got.PhysicalBlockSize)
	require.EqualValues(t, 65536, *got.DiscardGranularity)
	require.EqualValues(t, 65536, *replaced(blocks(long+` discard_granularity="65536"`),
		4096).DiscardGranularity)

	disks := served("a")
	disks[0].Export.BlockSize = 4096
	out, d := edited(t, before, vmi(), disks...)
	require.EqualValues(t, 4096, d.Devices.Disks[2].BlockIO.LogicalBlockSize)
	_, d = edited(t, squeezed(t, out), vmi(), disks...)
	require.EqualValues(t, 4096, d.Devices.Disks[2].BlockIO.LogicalBlockSize)
}

// TestVirtioOfKubeVirt has domains that the converter of KubeVirt 1.7.0 has made, of machines with
// one virtio disk, or, where the name says alone, with neither a disk nor a memory balloon.
func TestVirtioOfKubeVirt(t *testing.T) {
	const modern, old = "virtio-non-transitional", "virtio-transitional"
	for name, want := range map[string]struct {
		model, iommu string
		queues       uint
		spec         string // what the domain does not say
	}{
		"sev":                {model: modern, iommu: "on"},
		"snp":                {model: modern, iommu: "on"},
		"tdx":                {model: modern},
		"se":                 {model: "virtio", iommu: "on"},
		"s390x":              {model: "virtio"},
		"transitional":       {model: old},
		"blocks":             {model: modern},
		"multiqueue":         {model: modern, queues: 2},
		"alone-sev":          {model: modern, iommu: "on"},
		"alone-se":           {model: "virtio", iommu: "on"},
		"alone-transitional": {model: old},
		"alone-multiqueue": {model: modern, queues: 2,
			spec: `"domain": {"devices": {"blockMultiQueue": true}}`},
	} {
		t.Run(name, func(t *testing.T) {
			domain := testtool.Must(os.ReadFile("testdata/kubevirt-1.7.0/" + name + ".xml"))(t)
			_, d := edited(t, string(domain), machineOf(want.spec), served("a")...)
			disk := d.Devices.Disks[len(d.Devices.Disks)-1]
			require.Equal(t, "nbd", disk.Source.Network.Protocol)
			require.Equal(t, want.model, disk.Model)
			require.Equal(t, want.iommu, disk.Driver.IOMMU)
			queues := uint(0)
			if disk.Driver.Queues != nil {
				queues = *disk.Driver.Queues
			}
			require.Equal(t, want.queues, queues)
			if len(d.Devices.Disks) == 1 {
				return
			}
			_, d = edited(t, string(domain), machineOf("", "replace", "root"), served("a")...)
			require.Equal(t, want.model, d.Devices.Disks[0].Model)
			require.Equal(t, want.iommu, d.Devices.Disks[0].Driver.IOMMU)
			require.Nil(t, d.Devices.Disks[0].BlockIO)
		})
	}
}
