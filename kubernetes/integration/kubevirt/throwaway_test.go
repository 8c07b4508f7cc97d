package kubevirt

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/kubernetes/integration/node"
)

// throwaway is a machine whose disk ends with it. The guest reads each block as the image has it,
// and writes; it is paused, and deleted.
func (c *cluster) throwaway(t *testing.T) {
	c.Apply(t, c.manifest(t, "throwaway.yaml"))
	m := c.running(t, "throwaway")
	require.Equal(t, c.imageSum(t), m.sum("/dev/vda"), "what the guest reads")
	require.Contains(t, c.Kubectl(t, "exec", m.pod.Name, "-c", "hook-sidecar-0", "--",
		"kubevirt-disk", "sessions"), " unix:", "QEMU is at the socket, not at the address")
	require.Equal(t, c.qemu, m.qemu())
	m.write("/dev/vda")
	c.virtctl(t, "pause", "vmi", m.name)
	c.Kubectl(t, "wait", "vmi", m.name, "--for=condition=Paused", "--timeout=5m")
	c.virtctl(t, "unpause", "vmi", m.name)
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vm")
}

// replaced is a machine whose own disk, of KubeVirt, gets our source: it has one disk, with the bus
// and the serial number that KubeVirt gave it.
func (c *cluster) replaced(t *testing.T) {
	c.Apply(t, c.manifest(t, "replaced.yaml"))
	m := c.running(t, "replaced")
	require.Equal(t, "sda", m.run("cd /sys/block; echo [sv]d*"))
	require.Equal(t, "of-kubevirt", m.run("cat /sys/block/sda/device/vpd_pg80 | tr -dc a-z-"))
	require.Equal(t, c.imageSum(t), m.sum("/dev/sda"))
	m.write("/dev/sda")
	m.writes(10)
	m.found("/dev/sda")
	m.delete("vmi")
}

// streamed is a machine whose image is only in a registry: the base image fetches it while the
// guest boots.
func (c *cluster) streamed(t *testing.T) {
	c.Apply(t, c.instance("streamed", c.streams(), ""))
	m := c.running(t, "streamed")
	require.Equal(t, c.imageSum(t), m.sum("/dev/vda"))
	m.write("/dev/vda")
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vmi")
}

// existing is a machine from an image of a registry that others have made. Its disk is larger.
func (c *cluster) existing(t *testing.T) {
	c = c.in(t, "existing", "registries: trusted")
	c.Apply(t, c.manifest(t, "existing.yaml"))
	m := c.running(t, "existing")
	require.Equal(t, "41943040", m.run("cat /sys/block/vda/size"), "20 GiB")
	require.Equal(t, c.imageSum(t), m.begin("/dev/vda"))
	m.write("/dev/vda")
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vm")
}

// streams is a hook sidecar that streams the guest's image.
func (c *cluster) streams() string {
	return `{"image": "` + baseImage + `", "args": ["serve", "--image", "` + c.digest(streamedImage) +
		`", "--insecure-registry", "` + node.RegistryAddress + `"]}`
}

// imageSum is the SHA-256 of the guest's disk as the image has it.
func (c *cluster) imageSum(t *testing.T) string {
	t.Helper()
	return strings.Fields(output(t, "sha256sum", c.raw))[0]
}

// ownImage is a hook sidecar with an image of its own.
const ownImage = `{"image": "` + guestImage + `"}`

// instance is a machine with hook sidecars, in JSON, and more of its domain.
func (c *cluster) instance(name, sidecars, domain string) string {
	return `
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata:
  name: ` + name + `
  annotations:
    hooks.kubevirt.io/hookSidecars: '[` + sidecars + `]'
spec:
  evictionStrategy: None
  domain:
    devices: {}
    memory: {guest: 128Mi}
` + domain
}

// digest is the name of an image with its digest in the place of its tag.
func (c *cluster) digest(image string) string {
	return image[:strings.LastIndex(image, ":")] + "@" + c.Digest(image)
}
