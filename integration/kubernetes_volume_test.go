package integration

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/kubernetes/claim"
	"kubevirt.io/disk/libvirt"
)

// exampleVolume is the volume of examples/kubernetes/volume.yaml, bound to its claim as in a
// cluster, and the secret that it refers to.
func exampleVolume(t *testing.T) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume,
	*corev1.Secret) {
	t.Helper()
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
	return c, v, secret
}

// volumeCHAP is the environment of a daemon with the credential of the example.
func volumeCHAP(secret *corev1.Secret) map[string]string {
	return map[string]string{
		"CHAP_USERNAME": secret.StringData["node.session.auth.username"],
		"CHAP_PASSWORD": secret.StringData["node.session.auth.password"],
	}
}

// TestKubernetesVolumeExample opens the volume of the example with QEMU, with the arguments that a
// handler makes from the claim.
func TestKubernetesVolumeExample(t *testing.T) {
	t.Parallel()
	requireTools(t, "qemu-io", qemuISCSI)
	c, v, secret := exampleVolume(t)
	chap := volumeCHAP(secret)
	d := start(t, config{diskDir: blank(t, "disk.raw"),
		env: with(chap, "LISTEN", freePortal(t))})
	v.Spec.ISCSI.TargetPortal = d.Portals[0]
	disk, err := claim.Disk(c, v, claim.Options{Username: chap["CHAP_USERNAME"],
		Device: libvirt.Device{Dev: "sda"}})
	require.NoError(t, err)
	require.Nil(t, disk.Shareable)
	require.Equal(t, "default.my-fedora-chap", disk.Auth.Secret.Usage)
	lun, _, err := libvirt.FromDisk(disk)
	require.NoError(t, err)
	ok(t, "qemu-io", "-f", "raw", "-c", "write -P 5 0 64k", "-c", "read -P 5 0 64k",
		fmt.Sprintf("iscsi://%s%%%s@%s/%s/%d", disk.Auth.Username, chap["CHAP_PASSWORD"],
			lun.Portals[0], lun.TargetName, lun.Number))
}

// kubernetesVolume attaches the example's volume as the kubelet does, by its fields and its secret.
// As with a Service, the guest reaches the daemon at an address that the daemon does not know.
func (k *kernelTest) kubernetesVolume(t *testing.T) {
	_, v, secret := exampleVolume(t)
	c := diskContainer(t, readKubernetesExamples(t).pods["my-fedora-disk"])
	env := with(volumeCHAP(secret), "LISTEN", freePortal(t))
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	delete(env, "READY_FILE") // start waits for it
	k.serve(t, config{diskDir: blank(k.all, "disk.raw"), env: env})
	v.Spec.ISCSI.TargetPortal = "10.0.2.2:" + k.d.Port()
	data := map[string][]byte{}
	for key, value := range secret.StringData {
		data[key] = []byte(value)
	}
	script, device, err := guest.Attach(v.Spec.ISCSI, data)
	require.NoError(t, err)
	k.ok(t, script+"dd if=/dev/urandom of="+device+" bs=64k count=4 oflag=direct conv=fsync")
	require.NotZero(t, allocated(t, k.disk("disk.raw")))
	k.ok(t, fmt.Sprintf("iscsiadm -m node -p %s -T %s --logout\niscsiadm -m node -o delete\n"+
		"iscsiadm -m discoverydb -t sendtargets -p %[1]s -o delete\ndmesg -C",
		v.Spec.ISCSI.TargetPortal, v.Spec.ISCSI.IQN))
}
