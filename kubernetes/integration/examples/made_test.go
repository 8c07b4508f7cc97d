package examples

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"libvirt.org/go/libvirtxml"
	"sigs.k8s.io/yaml"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/claim"
	"kubevirt.io/disk/kubernetes/vmdisk"
	"kubevirt.io/disk/libvirt"
)

// made compares what handlers make now with the file that tests without Kubernetes run. With
// KUBEVIRT_DISK_MAKE=1 it makes the file.
func made(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("KUBEVIRT_DISK_MAKE") == "1" {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	is := testtool.Must(os.ReadFile(path))(t)
	require.Equal(t, string(is), text, "%s is old: run this test with KUBEVIRT_DISK_MAKE=1", path)
}

// TestVMDisksAreMade: TestVMDisks of the main module runs this pod, and uses the disks of this
// domain.
func TestVMDisksAreMade(t *testing.T) {
	text := testtool.Must(os.ReadFile("testdata/vm.yaml"))(t)
	var document map[string]any
	require.NoError(t, yaml.Unmarshal(text, &document))
	disks := testtool.Must(vmdisk.Parse(document))(t)
	pod := &corev1.Pod{}
	pod.Kind, pod.APIVersion, pod.Name = "Pod", "v1", "vm"
	require.NoError(t, vmdisk.AddToPod(&pod.Spec, disks, vmdisk.Pod{Secret: "chap", Remote: true,
		Claims: map[string]string{"vdb": "data"}}))
	text = testtool.Must(yaml.Marshal(pod))(t)
	made(t, "pod.yaml", string(text))

	devices := &libvirtxml.DomainDeviceList{}
	require.NoError(t, vmdisk.AddToDomain(devices, disks, vmdisk.Domain{Host: "192.0.2.1",
		Initiator:  "iqn.2017-01.io.kubevirt:vm",
		Credential: libvirt.Credential{Username: "vm", SecretUsage: "chap"}}))
	domain := testtool.Must((&libvirtxml.Domain{Type: "qemu", Name: "vm", Devices: devices,
		Memory: &libvirtxml.DomainMemory{Value: 64, Unit: "MiB"},
		OS:     &libvirtxml.DomainOS{Type: &libvirtxml.DomainOSType{Type: "hvm"}}}).Marshal())(t)
	made(t, "domain.xml", domain+"\n")
}

// TestVolumeExampleIsMade: the volume of examples/kubernetes/volume.yaml, bound to its claim as in
// a cluster, is a disk that TestKubernetesVolumeExample of the main module uses.
func TestVolumeExampleIsMade(t *testing.T) {
	all := readKubernetesExamples(t)
	require.Len(t, all.volumes, 1)
	v := all.volumes["my-fedora-disk"]
	c := all.claims[v.Spec.ClaimRef.Name]
	require.NotNil(t, c)
	// A cluster's binder compares these.
	require.Equal(t, v.Spec.ClaimRef.Namespace, c.Namespace)
	require.Equal(t, v.Name, c.Spec.VolumeName)
	require.Equal(t, v.Spec.StorageClassName, *c.Spec.StorageClassName)
	require.Equal(t, v.Spec.AccessModes, c.Spec.AccessModes)
	require.Equal(t, v.Spec.VolumeMode, c.Spec.VolumeMode)
	require.Equal(t, v.Spec.Capacity.Storage(), c.Spec.Resources.Requests.Storage())

	c.UID, v.Spec.ClaimRef.UID = "1", "1"
	c.Status.Phase, c.Status.AccessModes = corev1.ClaimBound, c.Spec.AccessModes
	secret := all.secrets[v.Spec.ISCSI.SecretRef.Name]
	require.NotNil(t, secret)
	disk := testtool.Must(claim.Disk(c, v, claim.Options{
		Username: secret.StringData["node.session.auth.username"],
		Device:   libvirt.Device{Dev: "sda"}}))(t)
	require.Nil(t, disk.Shareable)
	made(t, "volume.xml", testtool.Must(disk.Marshal())(t)+"\n")
}
