package integration

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// bootDisk makes a disk of 64 MiB from which a PC boots by itself.
func bootDisk(t *testing.T) (raw string) {
	t.Helper()
	requireTools(t, "apt-get", "dpkg-deb", "mke2fs")
	raw = filepath.Join(t.TempDir(), "guest.raw")
	err := guest.BootDisk(raw, 64<<20, guest.Options{Modules: []string{"virtio_blk"},
		CacheDir: filepath.Join("..", "cache", "guest")})
	var fetch *guest.FetchError
	if errors.As(err, &fetch) && os.Getenv(requireToolsEnv) != "1" {
		t.Skip(err.Error())
	}
	require.NoError(t, err)
	return raw
}

// bootVolume boots a machine from a volume, and returns the machine and QEMU's monitor.
func bootVolume(t *testing.T, a api.Volume) (*kernelGuest, *monitor) {
	t.Helper()
	return bootFrom(t, "-drive", "if=none,id=disk,format=raw,file="+volumeURL(a))
}

// bootFrom boots a machine from a disk called "disk", which the arguments make, and returns the
// machine and QEMU's monitor.
func bootFrom(t *testing.T, disk ...string) (*kernelGuest, *monitor) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), guestBoot)
	defer cancel()
	dir := t.TempDir()
	qmp := filepath.Join(dir, "qmp")
	m, err := guest.Start(ctx, guest.MachineOptions{Dir: dir, FromDisk: true,
		Args: append(disk, "-device", "virtio-blk-pci,drive=disk,bootindex=1",
			"-qmp", "unix:"+qmp+",server=on,wait=off")})
	require.NoError(t, err)
	t.Cleanup(m.Close)
	conn, err := net.Dial("unix", qmp)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	control := &monitor{t: t, in: conn, out: bufio.NewScanner(conn)}
	require.True(t, control.out.Scan(), "the greeting")
	control.good("qmp_capabilities", nil)
	return &kernelGuest{Machine: m}, control
}

// TestVolumeBoots: a machine boots from a volume that PUT has made and curl has filled. The volume
// is enlarged while it runs, and the machine uses the new space. Then the volume is deleted and
// made again.
func TestVolumeBoots(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	requireTools(t, "curl", "qemu-system-x86_64", "qemu-img", qemuISCSI)
	raw := bootDisk(t)
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
	g.ok(t, `test "$(cat /sys/block/vda/size)" = 131072`)

	grown := v.json(http.StatusOK, "PUT", "/volume/vm1", "size: 96Mi\nfrom: {upload: true}")
	require.Equal(t, api.Size(96<<20), grown.Info.Size)
	require.Equal(t, first.Info.Serial, grown.Info.Serial)
	control.good("block_resize", map[string]any{"device": "disk", "size": 96 << 20})
	g.ok(t, `for i in $(seq 3000); do test "$(cat /sys/block/vda/size)" = 196608 && break; sleep 0.1; done
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
	v.until("nobody uses it", func() bool { return len(v.status().Sessions) == 0 })
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/vm1"))
	require.Empty(t, v.status().LUNs)

	again := fill()
	require.EqualValues(t, 64<<20, again.Info.Size)
	require.NotEqual(t, first.Info.Serial, again.Info.Serial)
	ok(t, "qemu-img", "compare", "-q", "-f", "raw", "-F", "raw", raw, volumeURL(again))
}
