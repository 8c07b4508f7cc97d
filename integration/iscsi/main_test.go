// Package iscsi has the tests of what iSCSI initiators see: libiscsi, QEMU and the kernel, disks
// in each copy mode, restarts, handovers and the pages.
package iscsi

import (
	"testing"

	"kubevirt.io/disk/integration/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m) }
