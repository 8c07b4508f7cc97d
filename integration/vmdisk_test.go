package integration

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/vmdisk"
	"kubevirt.io/disk/libvirt"
)

// TestVMDisks treats two disks of a VM specification like a virt-controller and a virt-handler: the
// containers run as the pod says, and the LUNs in the domain exist, with the pod's credential.
func TestVMDisks(t *testing.T) {
	t.Parallel()
	e := requireImages(t, "qemu-io", "ip", qemuISCSI, "virt-xml-validate")
	image, _ := oneDisk(t, e)
	var document map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(fmt.Sprintf(`
spec:
  domain:
    devices:
      disks:
      - type: ContainerRegistryDisk:v1alpha
        source: {name: %q}
        target: {device: sda}
      - type: RegistryDisk:v1alpha
        source: {name: %[1]q}
        target: {device: vdb}
        copy: {mode: copy-on-write}
`, image)), &document))
	disks, err := vmdisk.Parse(document)
	require.NoError(t, err)

	pod := &corev1.PodTemplateSpec{}
	require.NoError(t, vmdisk.AddToPod(&pod.Spec, disks, vmdisk.Pod{Secret: "chap", Remote: true,
		Claims: map[string]string{"vdb": "data"}}))
	require.Empty(t, restrictedViolations(&pod.Spec))

	n := namespace(t)
	domain := vmdisk.Domain{Host: n.host, Initiator: "iqn.2017-01.io.kubevirt:vm",
		Credential: libvirt.Credential{Username: "vm", SecretUsage: "chap"}}
	devices := &libvirtxml.DomainDeviceList{}
	require.NoError(t, vmdisk.AddToDomain(devices, disks, domain))
	text, err := (&libvirtxml.Domain{Type: "qemu", Name: "vm", Devices: devices,
		Memory: &libvirtxml.DomainMemory{Value: 64, Unit: "MiB"},
		OS:     &libvirtxml.DomainOS{Type: &libvirtxml.DomainOSType{Type: "hvm"}}}).Marshal()
	require.NoError(t, err)
	validate(t, text, "domain")

	secrets := map[string]*corev1.Secret{"chap": {StringData: map[string]string{
		"node.session.auth.username": "vm", "node.session.auth.password": "0123456789abcdef"}}}
	for i, c := range pod.Spec.InitContainers {
		one := *pod
		c.Name = "disk" // as runPod looks for
		one.Spec.InitContainers = []corev1.Container{c}
		running, places := runPod(t, e, image, n, &one, secrets)
		lun, _, err := libvirt.FromDisk(&devices.Disks[i])
		require.NoError(t, err)
		url := fmt.Sprintf("iscsi://vm%%%s@%s/%s/%d", "0123456789abcdef",
			lun.Portals[0], lun.TargetName, lun.Number)
		var last result
		testtool.Within(t, clientTimeout, func() bool {
			last = client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 5 0 64k", "-c",
				"read -P 5 0 64k", url)
			return last.status == 0 || !running.running(t)
		}, "the disk is served: %s", func() any { return last })
		require.True(t, running.running(t))
		require.NotZero(t, client(t, nil, "qemu-io", "-f", "raw", "-c", "read 0 64k",
			strings.Replace(url, "0123456789abcdef", "wrong-password", 1)).status)
		if disks[i].Device == "vdb" {
			require.FileExists(t, filepath.Join(places["disk-vdb-data"], "disk.img"))
		}
		require.Zero(t, running.stop(t))
	}
}
