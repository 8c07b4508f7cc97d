// Package kubevirt has the tests of what KubeVirt's launcher does with a hook sidecar of ours.
// They need root.
package kubevirt

import (
	"testing"

	"kubevirt.io/disk/integration/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m) }
