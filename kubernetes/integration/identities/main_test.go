// Package identities tests the controllers of VM identities against a real control plane.
package identities

import (
	"testing"

	"kubevirt.io/disk/kubernetes/integration/plane"
)

func TestMain(m *testing.M) { plane.Main(m) }
