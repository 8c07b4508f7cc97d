package images

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/objects"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

// TestVMDisks treats two disks of a VM specification like a kubelet and a libvirtd, with what
// package vmdisk makes of them: the containers run as the pod says, and the LUNs in the domain
// exist, with the pod's credential.
func TestVMDisks(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-io", "ip", rig.QEMUISCSI, "virt-xml-validate")
	image, _ := oneDisk(t, e)
	n := rig.Namespace(t)
	text := strings.ReplaceAll(rig.ReadFile(t, rig.HandlerMade+"domain.xml"), "192.0.2.1", n.Host)
	rig.Validate(t, text, "domain")

	domain := &libvirtxml.Domain{}
	require.NoError(t, domain.Unmarshal(text))
	made := testtool.Must(objects.Read(rig.HandlerMade + "pod.yaml"))(t)
	pod := made[0].PodOf()
	require.Len(t, pod.Spec.InitContainers, 2)

	secrets := map[string]map[string]string{"chap": {
		"node.session.auth.username": "vm", "node.session.auth.password": "0123456789abcdef"}}
	for i, c := range pod.Spec.InitContainers {
		one := *pod
		c.Name = "disk" // as runPod looks for
		one.Spec.InitContainers = []objects.Container{c}
		running, places := runPod(t, e, image, n, &one, secrets)
		lun, _ := testtool.Must2(libvirt.FromDisk(&domain.Devices.Disks[i]))(t)
		url := fmt.Sprintf("iscsi://vm%%%s@%s/%s/%d", "0123456789abcdef",
			lun.Portals[0], lun.TargetName, lun.Number)
		var last rig.Result
		testtool.Within(t, rig.Timeout, func() bool {
			last = rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 5 0 64k", "-c",
				"read -P 5 0 64k", url)
			return last.Status == 0 || !running.Running(t)
		}, "the disk is served: %s", func() any { return last })
		require.True(t, running.Running(t))
		require.NotZero(t, rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "read 0 64k",
			strings.Replace(url, "0123456789abcdef", "wrong-password", 1)).Status)
		if domain.Devices.Disks[i].Target.Dev == "vdb" {
			require.FileExists(t, filepath.Join(places["disk-vdb-data"], "disk.img"))
		}
		require.Zero(t, running.Stop(t))
	}
}
