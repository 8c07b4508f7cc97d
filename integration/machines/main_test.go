// Package machines has the tests of virtual machines: container images that boot, libvirt, live
// migration.
package machines

import (
	"testing"

	"kubevirt.io/disk/integration/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m) }
