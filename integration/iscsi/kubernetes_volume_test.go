package iscsi

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

// exampleVolume is where the volume of examples/kubernetes/volume.yaml is, and the secret that it
// refers to.
func exampleVolume(t *testing.T) (*guest.ISCSI, map[string]string) {
	t.Helper()
	all := rig.ReadKubernetesExamples(t)
	require.Len(t, all.Volumes, 1)
	v := all.Volumes["my-fedora-disk"]
	secret := all.Secrets[v.SecretRef.Name]
	require.NotEmpty(t, secret)
	return v, secret
}

// volumeCHAP is the environment of a daemon with the credential of the example.
func volumeCHAP(secret map[string]string) map[string]string {
	return map[string]string{
		"CHAP_USERNAME": secret["node.session.auth.username"],
		"CHAP_PASSWORD": secret["node.session.auth.password"],
	}
}

// TestKubernetesVolumeExample opens the volume of the example with QEMU, with the arguments that a
// handler makes from the claim: the module kubernetes checks that it does.
func TestKubernetesVolumeExample(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", rig.QEMUISCSI)
	_, secret := exampleVolume(t)
	chap := volumeCHAP(secret)
	d := rig.Start(t, rig.Config{DiskDir: blank(t, "disk.raw"),
		Env: with(chap, "LISTEN", rig.FreePortal(t))})
	disk := &libvirtxml.DomainDisk{}
	require.NoError(t, disk.Unmarshal(rig.ReadFile(t, rig.HandlerMade+"volume.xml")))
	host, port := testtool.Must2(net.SplitHostPort(d.Portals[0]))(t)
	at := &disk.Source.Network.Hosts[0]
	require.Equal(t, "10.96.0.50:3260", at.Name+":"+at.Port)
	at.Name, at.Port = host, port
	require.Equal(t, "default.my-fedora-chap", disk.Auth.Secret.Usage)
	lun, _ := testtool.Must2(libvirt.FromDisk(disk))(t)
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "write -P 5 0 64k", "-c", "read -P 5 0 64k",
		fmt.Sprintf("iscsi://%s%%%s@%s/%s/%d", disk.Auth.Username, chap["CHAP_PASSWORD"],
			lun.Portals[0], lun.TargetName, lun.Number))
}

// kubernetesVolume attaches the example's volume as the kubelet does, by its fields and its secret.
// As with a Service, the guest reaches the daemon at an address that the daemon does not know.
func (k *kernelTest) kubernetesVolume(t *testing.T) {
	v, secret := exampleVolume(t)
	c := rig.DiskContainer(t, rig.ReadKubernetesExamples(t).Pods["my-fedora-disk"])
	env := with(volumeCHAP(secret), "LISTEN", rig.FreePortal(t))
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	delete(env, "READY_FILE") // start waits for it
	k.serve(t, rig.Config{DiskDir: blank(k.all, "disk.raw"), Env: env})
	v.TargetPortal = "10.0.2.2:" + k.d.Port()
	data := map[string][]byte{}
	for key, value := range secret {
		data[key] = []byte(value)
	}
	script, device := testtool.Must2(guest.Attach(v, data))(t)
	k.OK(t, script+"dd if=/dev/urandom of="+device+" bs=64k count=4 oflag=direct conv=fsync")
	require.NotZero(t, allocated(t, k.disk("disk.raw")))
	k.OK(t, fmt.Sprintf("iscsiadm -m node -p %s -T %s --logout\niscsiadm -m node -o delete\n"+
		"iscsiadm -m discoverydb -t sendtargets -p %[1]s -o delete\ndmesg -C",
		v.TargetPortal, v.IQN))
}
