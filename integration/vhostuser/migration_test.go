package vhostuser

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// TestMigration moves a guest that writes and compares from one QEMU to another. The disk's socket
// is for one of them. The other one has that of a second daemon, which relays the disk, and to
// which the first one hands it over.
func TestMigration(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	testMigration(t, rig.Installed)
}

// TestMigrationOfLaterQEMU is TestMigration with the QEMU of a later Debian.
func TestMigrationOfLaterQEMU(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "apt-get", "dpkg-deb")
	testMigration(t, rig.Later(t))
}

func testMigration(t *testing.T, generation rig.Generation) {
	nbd := filepath.Join(t.TempDir(), "nbd.sock")
	first := serve(t, rig.DiskDir(t, 64<<20), "--nbd=unix:"+nbd)
	source, control := boot(t, generation, first.socket("disk.raw"))
	source.OK(t, "disks=vda\n"+writers)
	source.OK(t, moreRounds(4))

	second := serve(t, t.TempDir(), "--disk=nbd+unix:///disk.raw?socket="+nbd)
	rig.Handover(t, first.conf.StateDir, 0, "--to=unix:"+nbd, "--for=30m")
	incoming := "unix:" + filepath.Join(first.sockets, "incoming")
	opt := machine(generation, second.socket("disk.raw"))
	opt.Incoming = incoming
	destination, here := rig.Boot(t, opt)
	source.OK(t, moreRounds(4))
	control.Good("migrate", map[string]any{"uri": incoming})
	testtool.Within(t, rig.GuestCommand, func() bool {
		state := control.Good("query-migrate", nil)
		require.NotContains(t, state, `"failed"`)
		return strings.Contains(state, `"completed"`)
	}, "the guest moves")
	testtool.Within(t, rig.GuestCommand, func() bool {
		return strings.Contains(here.Good("query-status", nil), `"running"`)
	}, "the guest runs")
	require.Contains(t, rig.Handover(t, first.conf.StateDir, 0, "--finish"),
		fmt.Sprintf("unix:%s, is fenced", first.socket("disk.raw")))

	destination.OK(t, moreRounds(8))
	source.Close()
	destination.OK(t, moreRounds(4))
	destination.OK(t, everythingWritten)
	require.Empty(t, destination.Warnings(t))
	sum := strings.Fields(destination.OK(t, "sync; md5sum /dev/vda"))[0]
	destination.Close()
	second.Stop()
	first.Stop()
	require.NotContains(t, first.Output()+second.Output(), "protocol_error")
	require.Equal(t, sum, fileSum(t, filepath.Join(first.conf.StateDir, "volume", "disk.img")))
}

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

// TestSave: a machine is paused and saved while its disk's content is away, and goes on in another
// QEMU when it is back. Its requests end there.
func TestSave(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	testSave(t, rig.Installed)
}

// TestSaveOfLaterQEMU is TestSave with the QEMU of a later Debian.
func TestSaveOfLaterQEMU(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "apt-get", "dpkg-deb")
	testSave(t, rig.Later(t))
}

func testSave(t *testing.T, generation rig.Generation) {
	nbd := filepath.Join(t.TempDir(), "nbd.sock")
	away := serve(t, rig.DiskDir(t, 64<<20), "--nbd=unix:"+nbd)
	relay := serve(t, t.TempDir(), "--disk=nbd+unix:///disk.raw?socket="+nbd)
	source, control := boot(t, generation, relay.socket("disk.raw"))
	source.OK(t, "md5sum /dev/vda >/tmp/before; head -c 4194304 /dev/urandom >/tmp/new")
	away.Crash()
	source.OK(t, `for n in 0 1 2 3; do
	dd if=/dev/vda of=/tmp/got.$n bs=1M skip=$((n * 8)) count=8 iflag=direct 2>>/tmp/errors &&
		echo $n >>/tmp/ended &
	dd if=/tmp/new of=/dev/vda bs=64k seek=$((512 + n * 64)) oflag=direct conv=notrunc,fsync \
		2>>/tmp/errors && echo $n >>/tmp/ended &
done`)
	relay.Until("requests wait", func() bool {
		sessions := relay.Status().Sessions
		return len(sessions) == 1 && sessions[0].Waiting >= 8
	})
	control.Good("stop", nil)
	saved := filepath.Join(t.TempDir(), "saved")
	control.Good("migrate", map[string]any{"uri": "exec:cat >" + saved})
	testtool.Within(t, rig.GuestCommand, func() bool {
		state := control.Good("query-migrate", nil)
		require.NotContains(t, state, `"failed"`)
		return strings.Contains(state, `"completed"`)
	}, "the machine is saved")
	source.Close()
	relay.UntilFree()

	opt := machine(generation, relay.socket("disk.raw"))
	opt.Incoming = "exec:cat " + saved
	restored, control := rig.Boot(t, opt)
	testtool.Within(t, rig.GuestCommand, func() bool {
		return strings.Contains(control.Good("query-status", nil), `"paused"`)
	}, "the machine is back")
	control.Good("cont", nil)
	away.start(t)
	restored.OK(t, until(`test "$(cat /tmp/ended | wc -l)" = 8`)+`
grep -v records /tmp/errors | grep -v copied && exit 1
for n in 0 1 2 3; do
	dd if=/dev/vda of=/tmp/again bs=1M skip=$((n * 8)) count=8 iflag=direct 2>/dev/null
	cmp /tmp/got.$n /tmp/again
	dd if=/dev/vda of=/tmp/again bs=64k skip=$((512 + n * 64)) count=64 iflag=direct 2>/dev/null
	cmp /tmp/new /tmp/again
done`)
	require.Empty(t, restored.Warnings(t))
	restored.Close()
	relay.Stop()
	away.Stop()
	require.NotContains(t, relay.Output()+away.Output(), "protocol_error")
}
