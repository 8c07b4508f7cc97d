// Package identities tests the controllers of VM identities against a real control plane.
package identities

import (
	"testing"
	"time"

	"kubevirt.io/disk/kubernetes/integration/plane"
)

func TestMain(m *testing.M) {
	plane.NodeGrace = 50 * time.Second // as in a cluster: a test loses nodes
	plane.Main(m)
}
