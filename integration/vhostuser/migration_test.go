package vhostuser

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

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

	second := serve(t, t.TempDir(),
		"--disk=nbd+unix:///disk.raw?socket="+nbd)
	status, out := rig.Handover(t, first.conf.StateDir, 0, "--lun=1", "--to=unix:"+nbd, "--for=30m")
	require.Zero(t, status, out)
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
	status, out = rig.Handover(t, first.conf.StateDir, 0, "--lun=1", "--finish")
	require.Zero(t, status, out)
	require.Contains(t, out, fmt.Sprintf("unix:%s, is fenced", first.socket("disk.raw")))

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
