// Package volumes has the tests of volumes that are made on demand by HTTP.
package volumes

import (
	"testing"

	"kubevirt.io/disk/integration/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m) }
