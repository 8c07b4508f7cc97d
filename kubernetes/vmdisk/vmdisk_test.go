package vmdisk_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/vmdisk"
	"kubevirt.io/disk/libvirt"
)

// proposal is a VM as the proposals write it.
const proposal = `
kind: VirtualMachine
spec:
  domain:
    devices:
      disks:
      - type: ContainerRegistryDisk:v1alpha
        source:
          name: vmdisks/fedora25:latest
        target:
          device: sda
      - type: RegistryDisk:v1alpha
        source: {name: "registry.example.com/data@sha256:aa"}
        target: {device: vdb}
        access-mode: write-shared
        copy: {mode: copy-on-write, usage-type: fast}
      - source: {pvc: {claimname: other}}
        target: {device: vdc}
`

func document(t *testing.T, text string) map[string]any {
	t.Helper()
	var all map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(text), &all))
	return all
}

func parse(t *testing.T, text string) []vmdisk.Disk {
	t.Helper()
	return testtool.Must(vmdisk.Parse(document(t, text)))(t)
}

func TestParse(t *testing.T) {
	want := []vmdisk.Disk{
		{Image: "vmdisks/fedora25:latest", Device: "sda"},
		{Image: "registry.example.com/data@sha256:aa", Device: "vdb",
			AccessMode: libvirt.WriteShared, CopyMode: "copy-on-write", UsageType: "fast"},
	}
	require.Equal(t, want, parse(t, proposal))
	require.Empty(t, parse(t, "kind: VirtualMachine\n"))
	require.Empty(t, parse(t, "disks: []\n"))
	read := parse(t, "disks: [{type: 'RegistryDisk:v1alpha', source: {name: a}, "+
		"target: {device: vda}, access-mode: read-only}]")
	require.Equal(t, []vmdisk.Disk{{Image: "a", Device: "vda", ReadOnly: true}}, read)
}

func TestParseRefuses(t *testing.T) {
	const disk = `disks: [{type: "RegistryDisk:v1alpha", `
	for text, want := range map[string]string{
		`disks: 3`:   "disks: want a list",
		`disks: [3]`: "disks[0]: want a disk with type",
		`disks: [{type: "RegistryDisk:v2"}]`: `disks[0].type: "RegistryDisk:v2" is a version ` +
			`that is not known: want ContainerRegistryDisk:v1alpha or RegistryDisk:v1alpha`,
		disk + `target: {device: sda}}]`:                      "disks[0].source: it is missing",
		disk + `source: {name: a}}]`:                          "disks[0].target: it is missing",
		disk + `source: {}, target: {device: sda}}]`:          `disks[0].source.name: "" is not`,
		disk + `source: {name: a b}, target: {device: sda}}]`: `source.name: "a b" is not`,
		disk + `source: {name: 3}, target: {device: sda}}]`:   "disks[0].source.name: want a string",
		disk + `source: {name: a, tag: b}, target: {device: sda}}]`: "disks[0].source.tag: the key " +
			"is unknown: want name",
		disk + `source: {name: a}, target: {bus: scsi}}]`: "disks[0].target.device: it is missing",
		disk + `source: {name: a}, target: {device: hda}}]`: `disks[0].target.device: "hda" is ` +
			`not a device name`,
		disk + `source: {name: a}, target: {device: sda, bus: ide}}]`: `disks[0].target.bus: "ide"`,
		disk + `source: {name: a}, target: {device: sda}, access-mode: all}]`: `disks[0].access-mode` +
			`: "all" is unknown`,
		disk + `source: {name: a}, target: {device: sda}, copy: {mode: x}}]`: `disks[0].copy.mode: ` +
			`"x" is unknown: want clone, copy-on-read`,
		`disks: [{type: "RegistryDisk:v1alpha", source: {name: a}, target: {device: sda}}, ` +
			`{type: "RegistryDisk:v1alpha", source: {name: b}, target: {device: sda}}]`: `disks[1]` +
			`.target.device: "sda" is also the device of disks[0]`,
	} {
		_, err := vmdisk.Parse(document(t, text))
		require.ErrorContains(t, err, want, text)
		var field *libvirt.FieldError
		require.ErrorAs(t, err, &field)
	}
}

func env(c corev1.Container) map[string]string {
	all := make(map[string]string)
	for _, v := range c.Env {
		all[v.Name] = v.Value
	}
	return all
}

// The pod serves the LUNs that the domain asks for.
func TestPodAndDomainAgree(t *testing.T) {
	disks := parse(t, proposal)
	spec := corev1.PodSpec{Containers: []corev1.Container{{Name: "vm"}},
		InitContainers: []corev1.Container{{Name: "first"}}}
	disks[0].BlockSize = 4096
	fast := corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}
	pod := vmdisk.Pod{Secret: "chap", Claims: map[string]string{"vdb": "data"},
		UsageTypes: map[string]corev1.VolumeSource{"fast": fast}}
	require.NoError(t, vmdisk.AddToPod(&spec, disks, pod))

	names := []string{}
	for _, c := range spec.InitContainers {
		names = append(names, c.Name)
	}
	require.Equal(t, []string{"disk-sda", "disk-vdb", "first"}, names)
	require.EqualValues(t, 107, *spec.SecurityContext.FSGroup)
	require.Len(t, spec.Volumes, 3)
	require.Equal(t, "data", spec.Volumes[2].PersistentVolumeClaim.ClaimName)

	domain := vmdisk.Domain{Credential: libvirt.Credential{Username: "vm", SecretUsage: "chap"},
		Initiator: "iqn.2017-01.io.kubevirt:vm"}
	devices := &libvirtxml.DomainDeviceList{}
	require.NoError(t, vmdisk.AddToDomain(devices, disks, domain))
	require.Equal(t, []libvirtxml.DomainController{{Type: "scsi", Model: "virtio-scsi"}},
		devices.Controllers)
	require.Len(t, devices.Disks, 2)
	for i, disk := range devices.Disks {
		lun, device := testtool.Must2(libvirt.FromDisk(&disk))(t)
		c := spec.InitContainers[i]
		require.Equal(t, env(c)["LISTEN"], lun.Portals[0].String())
		require.Equal(t, env(c)["TARGET_NAME"], lun.TargetName)
		require.Equal(t, 1, lun.Number)
		require.Equal(t, disks[i].BlockSize, lun.BlockSize)
		require.Equal(t, disks[i].Image, c.Image)
		require.Equal(t, disks[i].Device, device.Dev)
		require.Equal(t, "chap", c.EnvFrom[0].SecretRef.Name)
		require.EqualValues(t, lun.Portals[0].Port, c.Ports[0].ContainerPort)
	}
	require.NotNil(t, spec.Volumes[0].EmptyDir)
	require.Equal(t, fast, spec.Volumes[1].VolumeSource)
	require.Equal(t, "copy-on-write", env(spec.InitContainers[1])["COPY_MODE"])
	require.Equal(t, "write-shared", env(spec.InitContainers[1])["ACCESS_MODE"])
	require.NotNil(t, devices.Disks[1].Shareable)

	// A second controller would leave the disks of the first without one.
	devices = &libvirtxml.DomainDeviceList{Controllers: []libvirtxml.DomainController{
		{Type: "scsi", Model: "lsilogic"}}}
	domain.Host = "10.0.0.7"
	require.NoError(t, vmdisk.AddToDomain(devices, disks, domain))
	require.Len(t, devices.Controllers, 1)
	require.Equal(t, "10.0.0.7", devices.Disks[0].Source.Network.Hosts[0].Name)
}

// A server of its own needs nothing of the disk's image but the directory with the disk.
func TestServer(t *testing.T) {
	const image = "registry.example.com/disks/fedora@sha256:aa"
	pod := vmdisk.Pod{Server: "kubevirt.io:disk", Secret: "chap",
		Claims: map[string]string{"vda": "data"}}
	for _, filled := range []bool{false, true} {
		disks := []vmdisk.Disk{{Image: image, Device: "vda", Size: 20 << 30, Filled: filled}}
		var spec corev1.PodSpec
		require.NoError(t, vmdisk.AddToPod(&spec, disks, pod))
		c := spec.InitContainers[0]
		require.Equal(t, "kubevirt.io:disk", c.Image)
		require.Equal(t, "21474836480", env(c)["SIZE"])
		require.Equal(t, "/data", env(c)["PERSISTENT_DIR"])
		if filled {
			require.Len(t, c.VolumeMounts, 2)
			require.Len(t, spec.Volumes, 2)
			continue
		}
		require.Equal(t, corev1.VolumeMount{Name: "disk-vda-image", MountPath: "/disk",
			SubPath: "disk", ReadOnly: true}, c.VolumeMounts[2])
		require.Equal(t, image, spec.Volumes[2].Image.Reference)
	}
}

func TestRefusalsChangeNothing(t *testing.T) {
	disks := parse(t, proposal)
	fast := map[string]corev1.VolumeSource{"fast": {}}
	good := vmdisk.Pod{Secret: "chap", UsageTypes: fast}
	for want, try := range map[string]func(*corev1.PodSpec) error{
		"Pod.Secret: it is missing": func(s *corev1.PodSpec) error {
			return vmdisk.AddToPod(s, disks, vmdisk.Pod{})
		},
		`Pod.Claims: "vdz"`: func(s *corev1.PodSpec) error {
			return vmdisk.AddToPod(s, disks, vmdisk.Pod{Secret: "chap",
				Claims: map[string]string{"vdz": "x"}})
		},
		`disks[1].copy.usage-type: "fast" is unknown: there are ["slow"]`: func(
			s *corev1.PodSpec) error {
			return vmdisk.AddToPod(s, disks, vmdisk.Pod{Secret: "chap",
				UsageTypes: map[string]corev1.VolumeSource{"slow": {}}})
		},
		"disks[0].size: 513 is not a size": func(s *corev1.PodSpec) error {
			return vmdisk.AddToPod(s, []vmdisk.Disk{{Image: "a", Device: "sda", Size: 513}}, good)
		},
		"disks[0].block-size: 1024 is not the length of a": func(s *corev1.PodSpec) error {
			return vmdisk.AddToPod(s, []vmdisk.Disk{{Image: "a", Device: "sda",
				BlockSize: 1024}}, good)
		},
		"disks[0].Filled: it needs Pod.Server": func(s *corev1.PodSpec) error {
			return vmdisk.AddToPod(s, []vmdisk.Disk{{Image: "a", Device: "sda", Filled: true}},
				good)
		},
		"disks[0].source.name": func(s *corev1.PodSpec) error {
			return vmdisk.AddToPod(s, []vmdisk.Disk{{Device: "sda"}}, good)
		},
	} {
		var spec corev1.PodSpec
		require.ErrorContains(t, try(&spec), want)
		require.Empty(t, spec.InitContainers, want)
	}
	devices := &libvirtxml.DomainDeviceList{Disks: []libvirtxml.DomainDisk{
		{Target: &libvirtxml.DomainDiskTarget{Dev: "vdb"}}}}
	require.ErrorContains(t, vmdisk.AddToDomain(devices, disks, vmdisk.Domain{}),
		`the domain has a device "vdb" already`)
	require.Len(t, devices.Disks, 1)
	require.ErrorContains(t, vmdisk.AddToDomain(devices, disks, vmdisk.Domain{Host: "a b"}),
		"LUN.Portals[0].Host")
}

// TestDomainOfAnEncryptedMachine: disks and their controller have what the other virtio devices
// have.
func TestDomainOfAnEncryptedMachine(t *testing.T) {
	devices := &libvirtxml.DomainDeviceList{MemBalloon: &libvirtxml.DomainMemBalloon{
		Model:  "virtio-transitional",
		Driver: &libvirtxml.DomainMemBalloonDriver{IOMMU: "on"}}}
	disks := []vmdisk.Disk{{Image: "a:1", Device: "vda"}, {Image: "b:1", Device: "sda"}}
	require.NoError(t, vmdisk.AddToDomain(devices, disks, vmdisk.Domain{}))
	require.Equal(t, "virtio-transitional on", devices.Disks[0].Model+" "+
		devices.Disks[0].Driver.IOMMU)
	require.Equal(t, " ", devices.Disks[1].Model+" "+devices.Disks[1].Driver.IOMMU)
	require.Equal(t, "virtio-transitional", devices.Controllers[0].Model)
	require.Equal(t, "on", devices.Controllers[0].Driver.IOMMU)
}
