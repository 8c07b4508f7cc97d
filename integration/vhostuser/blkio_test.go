package vhostuser

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestLibblkio has the driver of libblkio, in QEMU's block layer, use disks: an implementation of
// vhost-user's front end that is not QEMU's own.
func TestLibblkio(t *testing.T) {
	t.Parallel()
	later := rig.Later(t)
	s := serve(t, rig.DiskDir(t, 64<<20))
	raw := rig.DiskDir(t, 64<<20) + "/disk.raw"
	disk := "driver=virtio-blk-vhost-user,cache.direct=on,path=" + s.socket("disk.raw")
	local := "driver=file,filename=" + raw
	rig.OK(t, later.Client("qemu-img"), "compare", "--image-opts", local, disk)
	s.UntilFree()
	args := []string{"--image-opts"}
	for _, command := range []string{"write -P 7 4k 132k", "write -f -P 8 1M 512", "write -z 2M 1M",
		"discard 8M 4M", "aio_write -P 9 16M 3M", "aio_write -P 10 20M 3M", "aio_flush", "flush",
		"read -P 7 4k 132k", "read -P 8 1M 512", "read -P 0 2M 1M", "read -P 9 16M 3M",
		"read -P 10 20M 3M"} {
		args = append(args, "-c", command)
	}
	require.NotContains(t, rig.OK(t, later.Client("qemu-io"), append(args, disk)...), "failed")
	s.UntilFree()
	rig.Pattern(t, raw, 64<<20, 0x42)
	rig.OK(t, later.Client("qemu-img"), "convert", "-n", "-W", "-m", "16", "--image-opts",
		"--target-image-opts", local, disk)
	s.UntilFree()
	rig.OK(t, later.Client("qemu-img"), "compare", "--image-opts", local, disk)
	s.Stop()
	require.NotContains(t, s.Output(), "protocol_error")
}
