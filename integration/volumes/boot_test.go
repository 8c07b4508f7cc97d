package volumes

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// bootVolume boots a machine from a volume, and returns the machine and QEMU's monitor.
func bootVolume(t *testing.T, a api.Volume) (*rig.KernelGuest, *rig.Monitor) {
	t.Helper()
	return rig.BootFrom(t, "-drive", "if=none,id=disk,format=raw,file="+volumeURL(a))
}

// TestVolumeBoots: a machine boots from a volume that PUT has made and curl has filled. The volume
// is enlarged while it runs, and the machine uses the new space. Then the volume is deleted and
// made again.
func TestVolumeBoots(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	rig.Need(t, "curl", "qemu-system-x86_64", "qemu-img", rig.QEMUISCSI)
	raw := rig.BootDisk(t)
	v := startVolumes(t, nil)
	fill := func() api.Volume {
		v.json(http.StatusAccepted, "PUT", "/volume/vm1", "from: {upload: true}")
		status, text := v.upload(raw, "vm1")
		require.Equal(t, http.StatusCreated, status, text)
		return v.ready("vm1")
	}
	first := fill()
	began := time.Now()
	g, control := bootVolume(t, first)
	t.Logf("booted after %s", time.Since(began))
	// The machine has booted from the disk: it has nothing else.
	g.OK(t, `test "$(cat /sys/block/vda/size)" = 131072`)

	grown := v.json(http.StatusOK, "PUT", "/volume/vm1", "size: 96Mi\nfrom: {upload: true}")
	require.Equal(t, api.Size(96<<20), grown.Info.Size)
	require.Equal(t, first.Info.Serial, grown.Info.Serial)
	control.Good("block_resize", map[string]any{"device": "disk", "size": 96 << 20})
	g.OK(t, `for i in $(seq 3000); do test "$(cat /sys/block/vda/size)" = 196608 && break; sleep 0.1; done
test "$(cat /sys/block/vda/size)" = 196608
head -c 1048576 /dev/urandom >/tmp/written
dd if=/tmp/written of=/dev/vda bs=1048576 seek=95 conv=notrunc,fsync 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
dd if=/dev/vda of=/tmp/read bs=1048576 skip=95 2>/dev/null
cmp /tmp/written /tmp/read
! dmesg | grep -iE 'I/O error|vda.*(error|fail)'`)

	e := v.refusal(http.StatusConflict, "DELETE", "/volume/vm1", "")
	require.Equal(t, api.CodeInUse, e.Code)
	g.Close()
	v.UntilFree()
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/vm1"))
	require.Empty(t, v.Status().LUNs)

	again := fill()
	require.EqualValues(t, 64<<20, again.Info.Size)
	require.NotEqual(t, first.Info.Serial, again.Info.Serial)
	rig.Same(t, raw, volumeURL(again))
}
