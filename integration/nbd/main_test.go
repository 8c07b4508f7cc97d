// Package nbd has the tests of what NBD clients see: QEMU, libnbd, nbdkit and the kernel.
package nbd

import (
	"testing"

	"kubevirt.io/disk/integration/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m) }
