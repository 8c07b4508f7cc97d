package vhostuser

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

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
