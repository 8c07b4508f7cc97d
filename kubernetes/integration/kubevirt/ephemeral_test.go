package kubevirt

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// ephemeral is a machine with a disk that ends with it. The guest reads each block as the image has
// it, and writes; it is paused, and deleted.
func (c *cluster) ephemeral(t *testing.T) {
	c.Apply(t, c.manifest(t, "ephemeral.yaml"))
	m := c.running(t, "ephemeral")
	require.Equal(t, c.imageSum(t), m.sum("/dev/vda"), "what the guest reads")
	m.write("/dev/vda")
	c.virtctl(t, "pause", "vmi", m.name)
	c.Kubectl(t, "wait", "vmi", m.name, "--for=condition=Paused", "--timeout=5m")
	c.virtctl(t, "unpause", "vmi", m.name)
	m.writes(10)
	m.found("/dev/vda")
	m.delete("vmi")
}
