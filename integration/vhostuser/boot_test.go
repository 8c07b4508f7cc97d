package vhostuser

import (
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// TestBoot: a machine boots from a disk by vhost-user, where the firmware and the boot loader read
// it first. It logs how long that takes, and how long it takes from a local file.
func TestBoot(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "qemu-system-x86_64")
	raw := rig.BootDisk(t)
	images := t.TempDir()
	require.NoError(t, exec.Command("cp", raw, images+"/boot.raw").Run())
	s := serve(t, images)
	var served, local []time.Duration
	for range 3 {
		opt := machine(rig.Installed, s.socket("boot.raw"))
		opt.FromDisk = true
		opt.Args = append(opt.Args, "-set", "device.disk0.bootindex=1")
		served = append(served, bootsIn(t, opt))
		s.UntilFree()

		opt = machine(rig.Installed)
		opt.FromDisk = true
		opt.Args = append(opt.Args, "-drive", "if=none,id=disk,format=raw,file="+raw, "-device",
			"virtio-blk-pci,drive=disk,bootindex=1")
		local = append(local, bootsIn(t, opt))
	}
	slices.Sort(served)
	slices.Sort(local)
	t.Logf("booted by vhost-user in %v, from a local file in %v", served, local)
}

// bootsIn is how long a machine takes to boot.
func bootsIn(t *testing.T, opt guest.MachineOptions) time.Duration {
	t.Helper()
	begun := time.Now()
	g, _ := rig.Boot(t, opt)
	took := time.Since(begun)
	g.OK(t, `test "$(cat /sys/block/vda/size)" = 131072`)
	g.Close()
	return took
}
