package kubevirt

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/kubernetes/integration/node"
)

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

// streams is a hook sidecar that streams the guest's image.
func (c *cluster) streams() string {
	return `{"image": "kubevirt.io:disk", "args": ["serve", "--image", "` + c.digest(streamedImage) +
		`", "--insecure-registry", "` + node.RegistryAddress + `"]}`
}

// imageSum is the SHA-256 of the guest's disk as the image has it.
func (c *cluster) imageSum(t *testing.T) string {
	t.Helper()
	return strings.Fields(output(t, "sha256sum", c.raw))[0]
}

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
